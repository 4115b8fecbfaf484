-- Copies what ends into the archive. It is sent when outcomes are written, after `lock` and before
-- `delete`: an unlocked copy and a DELETE would leave two of a row that is released in between.
INSERT INTO {archive} ({archived}, archived_at, reason, related_id, error_fingerprint)
SELECT m.id, m.queue, m.priority, m."key", m.dedup_id, m.headers, m.payload, u.state,
  m.attempts_count + u.attempts, m.deliveries_count + u.charge, m.publish_count, m.origin_id,
  m.created_at, m.next_attempt_at, m.expires_at,
  COALESCE(m.first_attempt_at, m.acquired_at + u.ended), \
  COALESCE(m.acquired_at + u.ended, m.last_attempt_at),
  m.acquired_at, COALESCE(u.error, m.last_error), m.hops, m.policy_key, {now}, \
  u.reason, u.related_id, u.fingerprint
-- `:rows` is JSON: one array for each message, in the order of `rows_json`. `ended` is the time
-- from the claim to the handler's end, in microseconds; NULL if no handler has ended.
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS state,
  json_extract(value, '$[2]') AS attempts, json_extract(value, '$[3]') AS charge,
  json_extract(value, '$[4]') AS ended, json_extract(value, '$[5]') AS reason,
  json_extract(value, '$[6]') AS error, json_extract(value, '$[7]') AS delay,
  json_extract(value, '$[8]') AS queue, json_extract(value, '$[9]') AS related_id,
  json_extract(value, '$[10]') AS published, json_extract(value, '$[11]') AS hop,
  json_extract(value, '$[12]') AS fingerprint, json_extract(value, '$[13]') AS new_key
  FROM json_each(:rows)) u
-- SQLite keeps the order of a CROSS JOIN: each message is searched by its id.
CROSS JOIN {message} m ON m.id = u.id
