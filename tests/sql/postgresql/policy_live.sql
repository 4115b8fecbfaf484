SELECT m.id, m.state, (extract(epoch FROM m.next_attempt_at) * 1000000)::bigint, (extract(epoch FROM m.acquired_at) * 1000000)::bigint,
  m.key, m.policy_marks, m.deliveries_count - m.attempts_count,
  CASE WHEN m.expires_at <= statement_timestamp() THEN 1 ELSE 0 END
FROM json_to_recordset((:rows)::json) AS u(id bigint) JOIN message m  ON m.id = u.id WHERE CASE WHEN m.queue = :queue THEN 1 ELSE 0 END = 1
