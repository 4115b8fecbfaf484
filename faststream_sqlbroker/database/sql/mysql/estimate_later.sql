-- Estimates what is due later of a queue and a priority, where `sample_later` found too many.
-- There is no hint: with one, MySQL does not look into the index. Python reads the column `rows`.
-- What stands by is due from 8970 on. A newer message of its key is delivered in its place.
EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} \
WHERE claimable = 1 AND queue = :queue AND priority = :priority \
  AND next_attempt_at > UTC_TIMESTAMP(6) AND next_attempt_at < '{standby_time}'
