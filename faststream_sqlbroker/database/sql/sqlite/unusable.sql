-- Finds messages of some pairs of queue and priority whose due time is no time: not of the years 1
-- to 9999, which Python knows, or text or bytes, which any column takes and which sort after all
-- numbers. It is sent before a claim, of pairs where a look has found such; `mend` follows.
-- The time is read as bytes: text that is no UTF-8 would make the whole answer unreadable.
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
