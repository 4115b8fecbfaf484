-- Estimates the archived messages of a queue, where `sample_ended` found too many to count.
-- There is no hint: with one, MySQL does not look into the index. Python reads the column `rows`.
EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {archive} WHERE queue = :queue
