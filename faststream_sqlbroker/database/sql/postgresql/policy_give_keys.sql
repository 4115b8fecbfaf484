-- :rows text :queue varchar
-- Notes the keys that were read from messages' headers: from now on policies go by these. The list
-- is one JSON bind, so the text never changes.
UPDATE {message} m SET policy_key = u.k, policy_marks = m.policy_marks | {header_key} \
FROM json_to_recordset((:rows)::json) AS u(id bigint, k text) \
WHERE m.id = u.id AND m.queue = :queue AND m.state IN ('PENDING', 'RETRYABLE')
