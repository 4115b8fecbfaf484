-- variants: by_header
-- :queue varchar :priority smallint :now bigint :size int
-- Reads what stands by for a newer message of its key and is to be looked at by `:now`.
-- The key is read as bytes: text that is not UTF-8 would fail the read.
-- MIN: another program may write created_at by a clock that is ahead, or text, which sorts after
-- all numbers. No message arrives after now.
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, MIN(m.created_at, {now})
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at >= {standby} AND (m.policy_marks & {held_burst}) > 0
  AND m.next_attempt_at <= :now
ORDER BY m.next_attempt_at, m.id LIMIT :size
