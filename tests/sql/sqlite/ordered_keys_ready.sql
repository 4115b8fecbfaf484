WITH RECURSIVE k(k, n) AS (
  SELECT (SELECT m."key" FROM message m INDEXED BY message_key
    WHERE m.queue = :queue AND m."key" >= :start ORDER BY m.queue, m."key" LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m."key" FROM message m INDEXED BY message_key
    WHERE m.queue = :queue AND m."key" > k.k ORDER BY m.queue, m."key" LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)
SELECT CAST(k.k AS BLOB), (SELECT m.id FROM message m INDEXED BY message_key
  WHERE m.queue = :queue AND m."key" = k.k AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
    AND (m.policy_marks & :mask) >= :mask ORDER BY m.id LIMIT 1) AS head
FROM k WHERE k.k IS NOT NULL ORDER BY k.n
