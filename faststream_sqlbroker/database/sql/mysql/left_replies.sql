-- :queue varchar :everything int
SELECT m.id
FROM {message} m FORCE INDEX ({ready_index})
WHERE m.claimable = 1 AND m.queue = :queue \
  AND (m.expires_at < UTC_TIMESTAMP(6) OR :everything = 1)
LIMIT {most_read}
