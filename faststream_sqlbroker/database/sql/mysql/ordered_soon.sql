-- :ids in
SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(m.next_attempt_at)) / 1000000 \
  FROM {message} m FORCE INDEX (PRIMARY)
WHERE m.id IN :ids AND CASE WHEN m.claimable = 1 \
  AND m.next_attempt_at > UTC_TIMESTAMP(6)
  THEN 1 ELSE 0 END = 1
