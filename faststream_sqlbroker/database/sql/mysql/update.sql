-- Settles messages that stay in the table: retries, moves to another queue, leases given back.
-- It is sent after `lock`, and changes exactly the rows whose lease was still held.
-- Each row is one array, in the order of Python's `rows_json`.
-- Text without a character set here has the database's, and loses what that cannot hold.
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (
    id BIGINT PATH '$[0]', state VARCHAR(16) PATH '$[1]', \
    attempts INT PATH '$[2]', charge INT PATH '$[3]',
    ended BIGINT PATH '$[4]', reason VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[5]',
    error LONGTEXT CHARACTER SET utf8mb4 PATH '$[6]',
    delay BIGINT PATH '$[7]', queue VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]',
    related_id BIGINT PATH '$[9]', published INT PATH '$[10]', hop INT PATH '$[11]',
    fingerprint VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[12]',
    new_key VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[13]')) u
-- Without the hint the server scans a small table, and waits for rows that others have locked.
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id
-- The order of SET matters: MySQL reads columns already assigned to. So `state` comes before
-- `attempts_count`, and the times of attempts before `acquired_at`.
SET m.state = COALESCE(u.state, \
  CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  -- With a new `queue` the message begins anew: attempts and deliveries are reset, dedup_id goes.
  m.first_attempt_at = CASE WHEN u.queue IS NULL
    THEN COALESCE(m.first_attempt_at, m.acquired_at + INTERVAL u.ended MICROSECOND) END,
  m.last_attempt_at = CASE WHEN u.queue IS NULL
    THEN COALESCE(m.acquired_at + INTERVAL u.ended MICROSECOND, m.last_attempt_at) END,
  m.acquired_at = NULL, m.lease_token = NULL, m.lease_expires_at = NULL,
  m.attempts_count = CASE WHEN u.queue IS NULL THEN m.attempts_count + u.attempts ELSE 0 END,
  m.deliveries_count = CASE WHEN u.queue IS NULL THEN m.deliveries_count + u.charge ELSE 0 END,
  m.next_attempt_at = CASE WHEN u.delay IS NULL THEN m.next_attempt_at
    ELSE UTC_TIMESTAMP(6) + INTERVAL u.delay MICROSECOND END,
  m.last_error = COALESCE(u.error, m.last_error), \
  m.publish_count = m.publish_count + u.published,
  -- 1 counts one more hop, 0 resets the count, NULL leaves it.
  m.hops = COALESCE((m.hops + 1) * u.hop, m.hops),
  m.dedup_id = CASE WHEN u.queue IS NULL THEN m.dedup_id END,
  -- These marks of policies outlive a delivery, but not a move.
  m.policy_marks = CASE WHEN u.queue IS NULL THEN m.policy_marks & {kept_marks} ELSE 0 END,
  -- NULL keeps the key, an empty one takes it away.
  m.`key` = CASE WHEN u.new_key IS NULL THEN m.`key`
    WHEN CHAR_LENGTH(u.new_key) > 0 THEN u.new_key END,
  m.queue = COALESCE(u.queue, m.queue)
