SELECT MIN(p.due_at) FROM message_policy_state p
WHERE p.scope = :scope AND p.due_at > (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)
