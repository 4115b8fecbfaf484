-- :ids bigint[] :tokens uuid[] :lease float
WITH r AS MATERIALIZED (
  SELECT m.ctid AS c
  FROM unnest(:ids, :tokens) AS u(id, token) JOIN {message} m ON m.id = u.id \
    AND m.lease_token = u.token
  ORDER BY m.id FOR UPDATE OF m SKIP LOCKED
)
UPDATE {message} m
SET lease_expires_at = GREATEST(m.lease_expires_at, \
  statement_timestamp() + :lease * interval '1 second')
WHERE m.ctid = ANY(ARRAY(SELECT r.c FROM r))
RETURNING m.id
