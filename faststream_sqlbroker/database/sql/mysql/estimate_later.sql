EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} WHERE claimable = 1 \
  AND queue = :queue AND priority = :priority AND next_attempt_at > UTC_TIMESTAMP(6) \
  AND next_attempt_at < '8970-01-01 00:00:00'
