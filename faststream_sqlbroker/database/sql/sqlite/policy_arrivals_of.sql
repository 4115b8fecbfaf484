-- variants: by_header
-- :rows text :queue varchar :before int :own int :size int
-- Reads what `policy_arrivals` reads, but of some keys and of all priorities. It is sent if a scan
-- has not come to its end, so that a large backlog keeps no key waiting that is complete.
-- The key is read as bytes: text that is not UTF-8 would fail the read.
-- MIN: another program may write created_at by a clock that is ahead, or text, which sorts after
-- all numbers. No message arrives after now.
-- The sum is more than 0 if the message was delivered before, or a Throttle has let it in.
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at, MIN(m.created_at, {now}),
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks, u.n
-- The list is short, and so are the keys: they are read key by key, in the order of the list.
FROM (SELECT json_extract(value, '$.n') AS n, json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u \
CROSS JOIN {message} m INDEXED BY {key_index} ON m.queue = :queue AND m.{key_column} = u.k
WHERE m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now} \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size
