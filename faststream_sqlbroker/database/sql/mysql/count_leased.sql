SELECT (SELECT count(*) FROM (SELECT 1 FROM {message} FORCE INDEX ({leased_index}) \
  WHERE queue = :queue AND lease_expires_at IS NOT NULL
  ORDER BY lease_expires_at LIMIT :most) AS found)
