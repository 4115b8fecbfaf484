-- variants: by_header
-- :rows text :queue varchar :size int
-- Reads what stands by of these keys, with ids between two, key by key, of each the oldest first.
-- What stands by for a newer message of its key has the mark {held_burst}.
-- It is due {standby} microseconds later than it would be.
-- Times are whole microseconds since 1970 (UTC), so that policies decide alike on every database.
-- Another program may write created_at by a clock that is ahead. No message arrives after now.
-- Keys that differ in spaces at their ends are equal here. The caller drops such rows.
SELECT m.id, m.{key_column}, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at),
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END, \
  TIMESTAMPDIFF(MICROSECOND, '1970-01-01', LEAST(m.created_at, UTC_TIMESTAMP(6))), \
  u.n
-- Text without a character set here has the database's, which may lack characters.
FROM JSON_TABLE(:rows, '$[*]' \
  COLUMNS (n BIGINT PATH '$.n', \
           k VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$.k', \
           low BIGINT PATH '$.low', \
           high BIGINT PATH '$.high')) u \
STRAIGHT_JOIN {message} m FORCE INDEX ({key_index}) \
  ON m.queue = :queue AND m.{key_column} = u.k AND m.id > u.low AND m.id < u.high
  -- No index serves a CASE: that of due times would give all that stands by.
  AND CASE WHEN m.claimable = 1 \
      AND m.next_attempt_at \
        >= (TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL {standby} MICROSECOND) \
      AND (m.policy_marks & {held_burst}) > 0 \
    THEN 1 ELSE 0 END = 1
ORDER BY u.n, m.id LIMIT :size
