SELECT queue FROM {message} WHERE state IN ('PENDING', 'RETRYABLE') AND queue > :after \
  ORDER BY queue LIMIT 1
