-- Gives a message that moves to another queue its new body, after `update`; few have one.
UPDATE {message} SET payload = :payload WHERE id = :id
