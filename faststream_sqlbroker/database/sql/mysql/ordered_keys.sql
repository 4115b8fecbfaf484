-- :queue varchar :start varchar :size int
SELECT k.k, (SELECT e.id FROM {message} e FORCE INDEX ({key_index})
  WHERE e.queue = :queue AND e.`key` = k.k \
    AND (e.expires_at IS NULL OR e.expires_at > UTC_TIMESTAMP(6)) \
    ORDER BY queue, `key`, e.id LIMIT 1) AS head
FROM (SELECT DISTINCT m.`key` AS k FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.`key` >= :start ORDER BY m.`key` LIMIT :size) k
ORDER BY k.k
