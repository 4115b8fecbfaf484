-- variants: by_header
-- :rows text :queue varchar :before int :own int :size int
-- Reads the due messages of these keys that a policy has not seen yet, of all priorities.
-- A claim sends it where `policy_arrivals` did not come to its end: a large backlog then keeps no
-- key waiting that is complete.
-- They have the marks of the policies before (:before), and lack the policy's own (:own).
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
-- The sum tells whether the message was delivered before, or let in by a Throttle.
SELECT m.id, m.{key_column}, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6))),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, \
  m.attempts_count + m.deliveries_count + (m.policy_marks & {let_in}), m.policy_marks, u.n
-- The list is short, and so are the keys: they are read key by key, in the order of the list.
-- Text without a character set here has the database's, which may lack characters.
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (n BIGINT PATH '$.n', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {message} m FORCE INDEX ({key_index}) \
  ON m.queue = :queue AND m.{key_column} = u.k
WHERE m.claimable = 1 AND m.next_attempt_at <= UTC_TIMESTAMP(6) \
  AND (m.policy_marks & :before) >= :before
  AND (m.policy_marks & :own) <= 0
ORDER BY u.n, m.next_attempt_at, m.id LIMIT :size
