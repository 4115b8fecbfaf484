-- variants: by_header
-- :queue varchar :mask smallint :start varchar :size int
-- Reads a queue's next keys from :start on, each with its first message that can be claimed,
-- whatever comes before it.
-- Claims by key that keep no order send it for keys that `ordered_window` did not show.
-- The index is named so that the messages of a key are found by it.
-- ORDER BY names the columns of the index: else MySQL sorts the key. MariaDB has its own text.
SELECT k.k, \
  (SELECT m.id FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.{key_column} = k.k AND m.claimable = 1 \
    AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY queue, {key_column}, m.id LIMIT 1) AS head
-- MySQL and MariaDB search no range from an outer column: a recursion from key to key would start
-- at the queue's first key each time. This walks the index from :start and stops.
FROM (SELECT DISTINCT m.{key_column} AS k FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.{key_column} >= :start \
  ORDER BY m.{key_column} LIMIT :size) k
ORDER BY k.k
