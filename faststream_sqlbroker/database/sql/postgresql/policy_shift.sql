-- variants: by_header
-- :mark int :kept int :rows text :queue varchar
UPDATE {message} m SET next_attempt_at = COALESCE((timestamptz 'epoch' + (u.due) / \
  1000000 * interval '1 second' + (u.due) % 1000000 * interval '1 microsecond'), \
  m.next_attempt_at), policy_marks = (m.policy_marks | :mark) & :kept \
  FROM json_to_recordset((:rows)::json) AS u(id bigint, due bigint, k text) \
  WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE') \
  AND (u.k IS NULL OR m.{key_column} = u.k)
