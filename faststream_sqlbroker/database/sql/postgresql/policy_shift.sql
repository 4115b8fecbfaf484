-- variants: by_header
-- :mark int :kept int :rows text :queue varchar
-- Gives messages a mark, leaves of their marks `kept`, and sets a due time unless that is NULL.
-- The list is one JSON bind, so the text never changes.
-- Times are whole microseconds since 1970 (UTC).
-- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
-- whole seconds and the microseconds left are added separately.
-- `u.k` guards a race: an operator's edit of the key commits after the claim has read it.
UPDATE {message} m \
SET next_attempt_at = COALESCE((timestamptz 'epoch' \
    + (u.due) / 1000000 * interval '1 second' \
    + (u.due) % 1000000 * interval '1 microsecond'), m.next_attempt_at), \
  policy_marks = (m.policy_marks | :mark) & :kept \
FROM json_to_recordset((:rows)::json) AS u(id bigint, due bigint, k text) \
WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE') \
  AND (u.k IS NULL OR m.{key_column} = u.k)
