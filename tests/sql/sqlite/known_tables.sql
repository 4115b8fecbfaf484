SELECT name FROM sqlite_master WHERE name IN (__[POSTCOMPILE_names])
