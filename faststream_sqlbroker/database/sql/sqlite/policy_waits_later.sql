-- :queue varchar :priority smallint :now bigint :size int
-- Reads some of what is due later, for `broker.admin.policies`, and to free what a policy that is
-- gone has put off.
-- The key is the one that was read from the headers, if the mark says so. It is read as bytes: text
-- that is not UTF-8 would fail the read.
-- SQLite may hold other values than numbers, until the next claim corrects or rejects them: the
-- reader looks.
SELECT m.id, \
  CAST(CASE WHEN (m.policy_marks & {header_key}) <> 0 THEN m.policy_key ELSE m."key" END \
    AS BLOB), \
  m.next_attempt_at, m.state,
  CASE WHEN m.expires_at <= {now} THEN 1 ELSE 0 END, \
  m.policy_marks, m.attempts_count, m.deliveries_count
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE')
  AND m.next_attempt_at > :now
ORDER BY m.next_attempt_at, m.id LIMIT :size
