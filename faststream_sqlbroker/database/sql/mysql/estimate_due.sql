EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} WHERE claimable = 1 \
  AND queue = :queue AND priority = :priority AND next_attempt_at <= UTC_TIMESTAMP(6)
