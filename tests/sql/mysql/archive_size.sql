SELECT data_length + index_length AS size, table_rows AS row_count
FROM information_schema.tables
WHERE table_schema = coalesce(:schema, database()) AND table_name = :archive
