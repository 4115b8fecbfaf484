SELECT m.id, m.key, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint
FROM message m 
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at <= statement_timestamp()
  AND m.next_attempt_at <= (timestamptz 'epoch' + (:now) / 1000000 * interval '1 second' + (:now) % 1000000 * interval '1 microsecond') AND (m.policy_marks & :before) >= :before
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final
ORDER BY m.next_attempt_at, m.id LIMIT :size
