-- :queue varchar :rows text
-- Finds the first live message of each key in `rows`, for `broker.admin.policies`. The list is one
-- JSON bind, so the text never changes.
-- One row of the index for each key: a subquery with a limit is never made a join.
SELECT u.k, (
  SELECT e.id FROM {message} e 
  WHERE e.queue = :queue AND e.key = u.k
    -- An expired message blocks no other: it will not be handled.
    AND (e.expires_at IS NULL OR e.expires_at > statement_timestamp())
  ORDER BY queue, key, e.id LIMIT 1
) FROM json_to_recordset((:rows)::json) AS u(k text)
