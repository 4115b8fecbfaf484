-- variants: by_header
-- :rows text :queue varchar :size int
SELECT m.id, m.{key_column}, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 \
    ELSE 0 END, (extract(epoch \
    FROM LEAST(m.created_at, statement_timestamp())) * 1000000)::bigint, u.n
FROM json_to_recordset((:rows)::json) AS u(n bigint, k text, low bigint, high bigint) \
  CROSS JOIN LATERAL (SELECT * FROM {message} m WHERE m.queue = :queue \
  AND m.{key_column} = u.k AND m.id > u.low AND m.id < u.high
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') \
    AND m.next_attempt_at >= (timestamptz 'epoch' + ({standby}) / 1000000 * interval \
    '1 second' + ({standby}) % 1000000 * interval '1 microsecond') \
    AND (m.policy_marks & {held_burst}) > 0 THEN 1 ELSE 0 END = 1 OFFSET 0) m
ORDER BY u.n, m.id LIMIT :size
