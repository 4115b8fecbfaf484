SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint AS size,
  sum(CASE WHEN c.relpages > 0 THEN c.reltuples / c.relpages * pg_relation_size(c.oid)
    / current_setting('block_size')::int ELSE 0 END)::float8 AS row_count
FROM pg_class c
WHERE c.relkind = 'r' AND (c.oid = to_regclass(:archive)
  OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(:archive)))
