-- :queues in
SELECT id FROM {message} FORCE INDEX ({leased_index})
WHERE queue IN :queues AND lease_expires_at IS NOT NULL AND lease_token = :token
