SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN message m INDEXED BY message_ready
WHERE m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]') AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > 253402300799999999
UNION ALL
SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN message m INDEXED BY message_ready
WHERE m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]') AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at < -62135596800000000
LIMIT :limit
