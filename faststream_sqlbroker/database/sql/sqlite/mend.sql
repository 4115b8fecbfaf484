-- Makes a message due now whose due time is no time. It is sent for what `unusable` has found.
UPDATE {message} SET next_attempt_at = {now} WHERE id = :id
