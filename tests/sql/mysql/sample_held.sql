SELECT count(*), count(CASE WHEN attempts_count > 0 THEN 1 END),
  count(CASE WHEN deliveries_count - attempts_count > 2 THEN 1 END)
FROM (SELECT attempts_count, deliveries_count FROM message FORCE INDEX (message_leased) WHERE queue = :queue AND lease_expires_at IS NOT NULL ORDER BY lease_expires_at LIMIT :most) AS found
