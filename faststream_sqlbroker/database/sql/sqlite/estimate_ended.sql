SELECT count(*) FROM (SELECT 1 FROM {archive} WHERE queue = :queue \
  LIMIT {most_counted}) AS found
