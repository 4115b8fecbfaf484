-- variants: by_header
-- :rows text :queue varchar
DELETE FROM {message} m USING json_to_recordset((:rows)::json) AS u(id bigint, \
  reason text, related_id bigint, \
  k text) WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
  AND (u.k IS NULL OR m.{key_column} = u.k)
