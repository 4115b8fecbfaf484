UPDATE message SET lease_expires_at = max(lease_expires_at, (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000) + :lease) WHERE id IN (__[POSTCOMPILE_ids])
