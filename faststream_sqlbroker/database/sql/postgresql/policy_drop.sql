-- variants: by_header
-- :rows text :queue varchar
-- Ends messages that have no lease, and keeps nothing of them. The list is one JSON bind, so the
-- text never changes.
DELETE FROM {message} m USING json_to_recordset((:rows)::json) \
  AS u(id bigint, reason text, related_id bigint, k text) \
WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  -- The race: an operator's edit of the key commits after the claim has read it.
  AND (u.k IS NULL OR m.{key_column} = u.k)
