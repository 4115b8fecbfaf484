-- variants: by_header
-- :queue varchar :priority smallint :since bigint :before int :own int :size int
SELECT m.id, m.{key_column}, \
  (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, \
  (extract(epoch FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 \
    ELSE 0 END, m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), \
    m.policy_marks
FROM {message} m 
WHERE m.queue = :queue AND m.priority = :priority \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND m.next_attempt_at >= (timestamptz 'epoch' + (:since) / 1000000 * interval \
    '1 second' + (:since) % 1000000 * interval '1 microsecond') \
    AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY m.next_attempt_at, m.id LIMIT :size
