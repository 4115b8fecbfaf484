-- variants: by_header
-- :queue varchar :mask smallint :scope varchar :size int
-- Reads the keys that a policy has something to do for, by the time since when, each with its first
-- message that can be claimed, whatever comes before it. It is sent if the window of
-- `ordered_window` was full and gave too few.
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT CAST(k.k AS BLOB), (SELECT m.id FROM {message} m INDEXED BY {key_index}
  WHERE m.queue = :queue AND m.{key_column} = k.k \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= {now}
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY m.id LIMIT 1) AS head
FROM (SELECT p."key" AS k, p.due_at AS due FROM {policy_state} p
  WHERE p.scope = :scope AND p.due_at <= {now} ORDER BY p.due_at LIMIT :size) k
ORDER BY k.due
