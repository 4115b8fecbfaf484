-- Reads the database's clock.
SELECT statement_timestamp()
