-- :ids in
-- Removes messages that have ended, after `archive` has copied those to be kept, and replies.
DELETE FROM {message} WHERE id IN :ids
