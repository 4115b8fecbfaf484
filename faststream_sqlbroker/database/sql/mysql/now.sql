-- Reads the database's clock (UTC).
SELECT UTC_TIMESTAMP(6)
