-- :queues varchar[]
-- Locks the claims of those of `queues` that no other claim has locked, for a claim under policies
-- or in order. A queue whose row is locked, or is not there yet, is left out.
WITH l AS MATERIALIZED (
  SELECT s.key AS queue FROM {policy_state} s
  WHERE s.scope = 'ordered' AND s.key = ANY(:queues)
  ORDER BY s.key FOR UPDATE SKIP LOCKED
)
-- A claim that holds the lock raises the version, too: what the others have read (`look`) is old by
-- then, so their `swap` writes nothing.
UPDATE {policy_state} s SET counter = s.counter + 1
FROM l WHERE s.scope = 'ordered' AND s.key = l.queue
RETURNING s.key
