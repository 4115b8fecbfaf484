SELECT id, lease_token FROM message FORCE INDEX (PRIMARY) WHERE id IN (__[POSTCOMPILE_ids])
