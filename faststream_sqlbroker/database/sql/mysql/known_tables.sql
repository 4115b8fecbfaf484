-- :names in
SELECT table_name FROM information_schema.tables WHERE table_name IN :names \
  AND table_schema = COALESCE(:schema, DATABASE())
