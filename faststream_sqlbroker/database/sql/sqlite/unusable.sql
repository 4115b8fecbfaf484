SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN {message} m INDEXED BY {ready_index}
WHERE m.queue = json_extract(p.value, '$[0]') \
  AND m.priority = json_extract(p.value, '$[1]') \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > {last_moment}
UNION ALL
SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN {message} m INDEXED BY {ready_index}
WHERE m.queue = json_extract(p.value, '$[0]') \
  AND m.priority = json_extract(p.value, '$[1]') \
  AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at < {first_moment}
LIMIT :limit
