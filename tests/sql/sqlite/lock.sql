SELECT id, lease_token FROM message WHERE id IN (__[POSTCOMPILE_ids])
