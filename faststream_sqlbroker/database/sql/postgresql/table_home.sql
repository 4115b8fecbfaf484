-- :name varchar :schema varchar
-- The schema that has a table, and whether the user may use it; no row: there is no such table.
SELECT n.nspname AS schema, has_schema_privilege(n.oid, 'USAGE') AS allowed
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relname = :name AND c.relkind IN ('r', 'p', 'v', 'f') AND (n.nspname = :schema
  OR :schema = '' AND (pg_table_is_visible(c.oid) OR NOT has_schema_privilege(n.oid, 'USAGE')
    AND n.nspname \
      = ANY (string_to_array(translate(current_setting('search_path'), '" ', ''), ','))))
ORDER BY pg_table_is_visible(c.oid) DESC LIMIT 1
