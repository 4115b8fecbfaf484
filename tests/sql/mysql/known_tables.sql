SELECT table_name FROM information_schema.tables WHERE table_name IN (__[POSTCOMPILE_names]) AND table_schema = COALESCE(:schema, DATABASE())
