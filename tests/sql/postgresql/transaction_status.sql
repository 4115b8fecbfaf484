SELECT pg_xact_status((:number)::text::xid8)
