SELECT m.queue, CAST(m."key" AS BLOB), CASE WHEN m.expires_at <= (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) THEN 1 ELSE 0 END
FROM message m WHERE m.id = :id
