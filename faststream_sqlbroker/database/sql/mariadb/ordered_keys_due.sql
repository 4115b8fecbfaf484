-- variants: by_header
-- :queue varchar :mask smallint :scope varchar :size int
-- Reads the keys that a policy has something to do for by now, the longest due first, each with
-- its first message that can be claimed, whatever comes before it.
-- Claims by key send it if the oldest messages, of `ordered_window`, were not enough.
-- The index is named so that the messages of a key are found by it.
-- MySQL's text also orders by the first columns of the index. MariaDB needs the id only.
SELECT k.k, \
  (SELECT m.id FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.{key_column} = k.k AND m.claimable = 1 \
    AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask \
  ORDER BY m.id LIMIT 1) AS head
FROM (SELECT p.`key` AS k, p.due_at AS due FROM {policy_state} p
  WHERE p.scope = :scope AND p.due_at <= UTC_TIMESTAMP(6) \
  ORDER BY p.due_at LIMIT :size) k
ORDER BY k.due
