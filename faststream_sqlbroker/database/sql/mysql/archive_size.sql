-- Tells the bytes of the archive with its indexes, and about how many rows it has, as the server's
-- statistics estimate both. MySQL may show those of the day before.
SELECT data_length + index_length AS size, table_rows AS row_count
FROM information_schema.tables
WHERE table_schema = coalesce(:schema, database()) AND table_name = :archive
