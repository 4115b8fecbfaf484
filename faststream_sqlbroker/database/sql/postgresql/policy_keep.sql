-- :scope varchar :rows text
-- Stores what a policy knows of each key, when that may be forgotten, and when to look at the key
-- again. The list is one JSON bind, so the text never changes.
-- Times are whole microseconds since 1970 (UTC).
INSERT INTO {policy_state} (scope, key, info, expires_at, due_at)
-- Trap: an interval is multiplied as a double, which has no single microseconds beyond 2255. So
-- whole seconds and the microseconds left are added separately.
SELECT :scope, u.k, u.info::jsonb, \
  (timestamptz 'epoch' \
    + (u.expires) / 1000000 * interval '1 second' \
    + (u.expires) % 1000000 * interval '1 microsecond'), \
  (timestamptz 'epoch' \
    + (u.due) / 1000000 * interval '1 second' \
    + (u.due) % 1000000 * interval '1 microsecond') \
FROM json_to_recordset((:rows)::json) AS u(k text, info text, expires bigint, due bigint)
ON CONFLICT (scope, key) DO UPDATE \
SET info = excluded.info, expires_at = excluded.expires_at, due_at = excluded.due_at
