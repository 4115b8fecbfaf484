-- Estimates the leased messages of a queue, where `sample_held` found too many to count.
-- There is no hint: with one, MySQL does not look into the index. Python reads the column `rows`.
EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {message} \
WHERE queue = :queue AND lease_expires_at IS NOT NULL
