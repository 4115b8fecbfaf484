-- Reads the database's clock, as policies count: in microseconds since 1970 (UTC).
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
