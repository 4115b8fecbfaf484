-- :scope varchar :rows text
INSERT INTO {policy_state} (scope, key, info, expires_at, due_at)
SELECT :scope, u.k, u.info::jsonb, \
  (timestamptz 'epoch' + (u.expires) / 1000000 * interval '1 second' + (u.expires) % \
  1000000 * interval '1 microsecond'), \
  (timestamptz 'epoch' + (u.due) / 1000000 * interval '1 second' + (u.due) % 1000000 * \
  interval '1 microsecond') FROM json_to_recordset((:rows)::json) AS u(k text, \
  info text, expires bigint, due bigint)
ON CONFLICT (scope, key) DO UPDATE \
  SET info = excluded.info, expires_at = excluded.expires_at, due_at = excluded.due_at
