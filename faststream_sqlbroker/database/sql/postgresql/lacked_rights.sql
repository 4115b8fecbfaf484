-- :ats varchar[] :ids varchar[] :verbs varchar[] :names varchar[]
-- A column that does not exist has no attnum, so the function gives NULL: no right is missing.
SELECT w.at::int, w.name
FROM unnest(:ats, :ids, :verbs, :names) AS w(at, id, verb, name)
LEFT JOIN pg_attribute a ON a.attrelid = w.id::oid AND a.attname = w.name AND NOT a.attisdropped
WHERE CASE w.verb WHEN 'USAGE' THEN NOT coalesce(has_sequence_privilege(
      pg_get_serial_sequence((w.id::oid)::regclass::text, 'id'), 'USAGE, UPDATE'), true)
  WHEN 'DELETE' THEN NOT has_table_privilege(w.id::oid, w.verb)
  ELSE NOT coalesce(has_column_privilege(w.id::oid, a.attnum, w.verb), true) END
