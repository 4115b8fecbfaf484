-- Steps from a queue's name to the next that has a leased message: DISTINCT would read every
-- message.
-- The state is written out, not bound: a partial index serves only conditions that name its own.
-- Another program may have stored bytes as a name. They come last, and no queue is theirs.
SELECT queue FROM {message} \
WHERE state = 'PROCESSING' AND queue > :after \
ORDER BY queue LIMIT 1
