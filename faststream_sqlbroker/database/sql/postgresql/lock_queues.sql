-- :queues varchar[]
WITH l AS MATERIALIZED (
  SELECT s.key AS queue FROM {policy_state} s
  WHERE s.scope = 'ordered' AND s.key = ANY(:queues)
  ORDER BY s.key FOR UPDATE SKIP LOCKED
)
UPDATE {policy_state} s SET counter = s.counter + 1
FROM l WHERE s.scope = 'ordered' AND s.key = l.queue
RETURNING s.key
