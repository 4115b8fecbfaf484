-- :ids in
-- Reads in how many seconds the first of some heads that wait for their time is due. It is sent
-- when a claim in order has found less than it wanted.
-- No index serves a CASE: the messages are searched by their ids, never by due time.
SELECT (MIN(m.next_attempt_at) - {now}) / 1000000.0 FROM {message} m 
WHERE m.id IN :ids \
  AND CASE WHEN m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > {now}
  THEN 1 ELSE 0 END = 1
