-- :ids in :pairs in
-- Marks messages before their handler gets this transaction; they stay locked by it. Other
-- transactions see the mark only if this one was committed; the ack removes it.
UPDATE {message} 
SET policy_marks = policy_marks | {joined}
WHERE id IN :ids AND (id, lease_token) IN :pairs
