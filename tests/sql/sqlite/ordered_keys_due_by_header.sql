SELECT CAST(k.k AS BLOB), (SELECT m.id FROM message m INDEXED BY message_policy_key
  WHERE m.queue = :queue AND m.policy_key = k.k AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND (m.policy_marks & :mask) >= :mask ORDER BY m.id LIMIT 1) AS head
FROM (SELECT p."key" AS k, p.due_at AS due FROM message_policy_state p
  WHERE p.scope = :scope AND p.due_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) ORDER BY p.due_at LIMIT :size) k
ORDER BY k.due
