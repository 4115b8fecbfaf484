-- :rows text :queue varchar
-- Archives messages that policies end; sent after `policy_lock` and before `policy_drop`.
-- Without the hint the server scans a small table.
INSERT INTO {archive} ({archived}, archived_at, reason, related_id)
-- The CASE gives when a message was due, without what was added while it stood by.
SELECT m.id, m.queue, m.priority, m.`key`, m.dedup_id, m.headers, m.payload, 'DISCARDED', \
  m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, m.created_at, \
  CASE WHEN m.next_attempt_at \
      >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL {standby} MICROSECOND) \
      AND (m.policy_marks & {held_burst}) > 0 \
    THEN (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL \
      (TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at) - {standby}) MICROSECOND) \
    ELSE m.next_attempt_at END, \
  m.expires_at, m.first_attempt_at, m.last_attempt_at, m.acquired_at, m.last_error, m.hops, \
  m.policy_key, UTC_TIMESTAMP(6), u.reason, u.related_id
-- Text without a character set here has the database's, which may lack characters.
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (id BIGINT PATH '$.id', \
           reason LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.reason', \
           related_id BIGINT PATH '$.related_id', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k')) u \
STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id \
WHERE m.queue = :queue AND m.claimable = 1
