SELECT count(*) FROM (SELECT 1 FROM {message} WHERE queue = :queue \
  AND state = 'PROCESSING' LIMIT {most_counted}) AS found
