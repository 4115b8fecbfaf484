-- Estimates the due messages of a queue and a priority, where `sample_due` found too many to count.
-- There is no hint: with one, MySQL does not look into the index. Python reads the column `rows`.
EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} \
WHERE claimable = 1 AND queue = :queue AND priority = :priority \
  AND next_attempt_at <= UTC_TIMESTAMP(6)
