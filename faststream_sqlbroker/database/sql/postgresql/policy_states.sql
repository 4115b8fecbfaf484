-- :rows text :scope varchar
-- Reads what a policy has stored under `scope` for each key in `rows`. The list is one JSON bind,
-- so the text never changes.
SELECT p.key, p.info::text
FROM json_to_recordset((:rows)::json) AS u(k text) \
  JOIN {policy_state} p ON p.scope = :scope AND p.key = u.k
