-- :queues in
-- Finds the messages that a claim has leased whose answer was lost; `lock` locks them then.
-- FOR UPDATE would wait for every lease of the queues, which a handler's transaction may have
-- locked for long.
-- The queues are constants: with a join MySQL would read all rows of a queue without a lease.
SELECT id FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues AND lease_expires_at IS NOT NULL AND lease_token = :token
