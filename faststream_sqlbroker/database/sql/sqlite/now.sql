-- The host's clock as SQLite reads it. It has milliseconds, and stands still within one statement.
SELECT {now}
