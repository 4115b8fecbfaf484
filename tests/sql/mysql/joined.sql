SELECT id, lease_token FROM message FORCE INDEX (PRIMARY)
WHERE id IN (__[POSTCOMPILE_ids]) AND (policy_marks & 8) <> 0 ORDER BY id FOR UPDATE
