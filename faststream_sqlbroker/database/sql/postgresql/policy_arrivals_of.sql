-- variants: by_header
-- :rows text :queue varchar :before int :own int :size int
-- `policy_arrivals` of the keys in `rows`, of all priorities. The list is short, and so are the
-- keys: read key by key, in the order of the list. It is one JSON bind: the text never changes.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, \
  (extract(epoch FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks, u.n
FROM json_to_recordset((:rows)::json) AS u(n bigint, k text) \
  JOIN {message} m  ON m.queue = :queue AND m.{key_column} = u.k
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp() \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size
