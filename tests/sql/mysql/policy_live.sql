SELECT m.id, m.state, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.next_attempt_at), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', m.acquired_at),
  m.`key`, m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= UTC_TIMESTAMP(6) THEN 1 ELSE 0 END
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id BIGINT PATH '$.id')) u STRAIGHT_JOIN message m FORCE INDEX (PRIMARY) ON m.id = u.id WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
