-- :ids in
-- Takes back the count of a delivery whose claim's answer was lost; sent before `release_stuck`.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
UPDATE {message} FORCE INDEX (PRIMARY) \
SET deliveries_count = deliveries_count - 1 \
WHERE id IN :ids
