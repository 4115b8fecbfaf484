-- :rows text :queue varchar
UPDATE {message} m SET policy_key = u.k, policy_marks = m.policy_marks | {header_key} \
  FROM json_to_recordset((:rows)::json) AS u(id bigint, k text) WHERE m.id = u.id \
  AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
