-- variants: by_header
-- :queue varchar :mask smallint :scope varchar :size int
-- Reads the keys that a policy has something to do for, by the time since when, with the first
-- message of each that can be claimed, whatever comes before it.
SELECT k.k, (SELECT m.id FROM {message} m 
  WHERE m.queue = :queue AND m.{key_column} = k.k \
    AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY m.id LIMIT 1) AS head
FROM (SELECT p.key AS k, p.due_at AS due FROM {policy_state} p
  WHERE p.scope = :scope AND p.due_at <= statement_timestamp() \
  ORDER BY p.due_at LIMIT :size) k
ORDER BY k.due
