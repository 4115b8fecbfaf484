-- :ids in
-- Reads in how many seconds the first of these messages is due; they are the heads that wait.
-- Without the hint the server scans a small table.
SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(m.next_attempt_at)) / 1000000 \
FROM {message} m FORCE INDEX (PRIMARY)
-- No index serves a CASE: only the ids can find the rows, not the index of ready messages.
WHERE m.id IN :ids \
  AND CASE WHEN m.claimable = 1 AND m.next_attempt_at > UTC_TIMESTAMP(6)
  THEN 1 ELSE 0 END = 1
