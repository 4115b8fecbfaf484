-- The clock that claims under policies go by, in microseconds since 1970 (UTC).
-- SQLite's clock has milliseconds, and stands still within one statement.
SELECT {now}
