-- Reads the database's clock, in microseconds since 1970 (UTC).
SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
