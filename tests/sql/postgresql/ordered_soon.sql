SELECT extract(epoch FROM min(m.next_attempt_at) - statement_timestamp())::float8 FROM message m 
WHERE m.id = ANY(:ids) AND m.state IN ('PENDING', 'RETRYABLE') AND m.next_attempt_at > statement_timestamp()
