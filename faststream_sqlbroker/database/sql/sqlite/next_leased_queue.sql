SELECT queue FROM {message} WHERE state = 'PROCESSING' AND queue > :after \
  ORDER BY queue LIMIT 1
