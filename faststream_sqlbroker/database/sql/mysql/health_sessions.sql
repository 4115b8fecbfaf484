-- Open transactions, the oldest first. The start of one is shown in the server's own time zone,
-- whatever the session's is.
SELECT 'session' AS kind, CAST(t.trx_mysql_thread_id AS CHAR) AS name, p.user AS user,
  p.host AS application, lower(p.command) AS state,
  TIMESTAMPDIFF(SECOND, t.trx_started, CONVERT_TZ(UTC_TIMESTAMP(), '+00:00', 'SYSTEM')) AS age,
  left(coalesce(t.trx_query, p.info), {query_characters}) AS query
FROM information_schema.innodb_trx t
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_mysql_thread_id <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT {max_sessions}
