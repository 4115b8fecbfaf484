UPDATE message FORCE INDEX (PRIMARY)
SET policy_marks = policy_marks | 8
WHERE id IN (__[POSTCOMPILE_ids]) AND (id, lease_token) IN (__[POSTCOMPILE_pairs]) ORDER BY id
