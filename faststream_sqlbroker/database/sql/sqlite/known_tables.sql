-- :names in
SELECT name FROM {schema_prefix}sqlite_master WHERE name IN :names
