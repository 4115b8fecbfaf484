-- :queue varchar :rows text
SELECT u.k, (
  SELECT e.id FROM {message} e 
  WHERE e.queue = :queue AND e.key = u.k
    AND (e.expires_at IS NULL OR e.expires_at > statement_timestamp())
  ORDER BY queue, key, e.id LIMIT 1
) FROM json_to_recordset((:rows)::json) AS u(k text)
