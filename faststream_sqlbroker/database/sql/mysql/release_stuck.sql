-- :ids in
-- Gives back messages whose lease has ended (`stuck`), or whose claim's answer was lost.
-- Without the hint the server scans a small table, and waits for rows that others have locked.
UPDATE {message} FORCE INDEX (PRIMARY)
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  -- These marks of policies outlive a delivery.
  policy_marks = policy_marks & {kept_marks}
WHERE id IN :ids
