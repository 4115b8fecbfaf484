-- :rows text :scope varchar
SELECT p.key, p.info::text
FROM json_to_recordset((:rows)::json) AS u(k text) JOIN {policy_state} p \
  ON p.scope = :scope AND p.key = u.k
