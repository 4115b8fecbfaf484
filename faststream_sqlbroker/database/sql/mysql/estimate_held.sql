EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} WHERE queue = :queue \
  AND lease_expires_at IS NOT NULL
