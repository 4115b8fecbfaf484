-- Copies messages that end into the archive; sent after `lock` and before `delete`.
-- The rows are locked: else a row that is released in between would be copied, and stay, too.
INSERT INTO {archive} ({archived}, archived_at, reason, related_id, error_fingerprint)
SELECT m.id, m.queue, m.priority, m.`key`, m.dedup_id, m.headers, m.payload, u.state,
  m.attempts_count + u.attempts, m.deliveries_count + u.charge, m.publish_count, m.origin_id,
  -- Another program's row may hold a zero date, which MySQL's usual sql_mode refuses to write.
  GREATEST(m.created_at, TIMESTAMP'0001-01-01 00:00:00'), \
  GREATEST(m.next_attempt_at, TIMESTAMP'0001-01-01 00:00:00'), \
  GREATEST(m.expires_at, TIMESTAMP'0001-01-01 00:00:00'),
  -- `ended` counts from the claim. It is NULL if no handler has ended.
  COALESCE(m.first_attempt_at, m.acquired_at + INTERVAL u.ended MICROSECOND),
  COALESCE(m.acquired_at + INTERVAL u.ended MICROSECOND, m.last_attempt_at),
  m.acquired_at, COALESCE(u.error, m.last_error), m.hops, m.policy_key, UTC_TIMESTAMP(6),
  u.reason, u.related_id, u.fingerprint
-- Each row is one array, in the order of Python's `rows_json`.
-- Text without a character set here has the database's, and loses what that cannot hold.
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (
    id BIGINT PATH '$[0]', state VARCHAR(16) PATH '$[1]', \
    attempts INT PATH '$[2]', charge INT PATH '$[3]',
    ended BIGINT PATH '$[4]', reason VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[5]',
    error LONGTEXT CHARACTER SET utf8mb4 PATH '$[6]',
    delay BIGINT PATH '$[7]', queue VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]',
    related_id BIGINT PATH '$[9]', published INT PATH '$[10]', hop INT PATH '$[11]',
    fingerprint VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[12]',
    new_key VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[13]')) u
-- Without the hint the server scans a small table.
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id
