-- Writes the new body of a message that stays. It is sent after `update`, for the few messages
-- whose body changes.
UPDATE {message} SET payload = :payload WHERE id = :id
