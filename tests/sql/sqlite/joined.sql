SELECT id, lease_token FROM message 
WHERE id IN (__[POSTCOMPILE_ids]) AND (policy_marks & 8) <> 0
