SELECT count(*) FROM (SELECT 1 FROM {message} WHERE state IN ('PENDING', 'RETRYABLE') \
  AND queue = :queue AND priority = :priority AND next_attempt_at > {now} \
  AND next_attempt_at < {standby} LIMIT {most_counted}) AS found
