SELECT count(*), count(CASE WHEN attempts_count > 0 THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count > 2 THEN 1 END)
FROM (SELECT attempts_count, deliveries_count FROM message WHERE queue = :queue AND state = 'PROCESSING' ORDER BY lease_expires_at LIMIT :most) AS found
