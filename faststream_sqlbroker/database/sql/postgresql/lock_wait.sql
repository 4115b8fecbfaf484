-- Limits how long statements wait for a lock, for the rest of the transaction. It is sent by a
-- settle that must not let one locked row delay its other outcomes.
SELECT set_config('lock_timeout', :limit, true)
