-- :rows text :queue varchar
-- Copies messages that a policy discards into the archive. It is sent after `policy_lock` and
-- before `policy_drop`, in one transaction.
-- What stands by is archived with its plain due time, without what was added for that.
-- SQLite keeps the order of a CROSS JOIN: each message is searched by its id.
INSERT INTO {archive} ({archived}, archived_at, reason, related_id)
SELECT m.id, m.queue, m.priority, m."key", m.dedup_id, m.headers, m.payload, 'DISCARDED', \
  m.attempts_count, m.deliveries_count, m.publish_count, m.origin_id, m.created_at, \
  CASE WHEN m.next_attempt_at >= {standby} AND (m.policy_marks & {held_burst}) > 0 \
    THEN (m.next_attempt_at - {standby}) ELSE m.next_attempt_at END, \
  m.expires_at, m.first_attempt_at, m.last_attempt_at, m.acquired_at, m.last_error, m.hops, \
  m.policy_key, {now}, u.reason, u.related_id
FROM (SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.reason') AS reason, \
    json_extract(value, '$.related_id') AS related_id, json_extract(value, '$.k') AS k \
  FROM json_each(:rows)) u \
CROSS JOIN {message} m  ON m.id = u.id \
WHERE m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
