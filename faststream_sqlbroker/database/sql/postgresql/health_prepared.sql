-- Prepared transactions, the oldest first.
SELECT 'prepared transaction' AS kind, gid AS name, owner AS user, NULL AS application,
  NULL AS state, extract(epoch FROM clock_timestamp() - prepared)::float8 AS age, NULL AS query
FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared LIMIT {max_sessions}
