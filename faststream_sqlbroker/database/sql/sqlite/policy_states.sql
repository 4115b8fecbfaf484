-- :rows text :scope varchar
-- Reads what a policy has stored of keys.
-- Keys are read as bytes: text that is not UTF-8 would fail the read.
SELECT CAST(p."key" AS BLOB), p.info
FROM (SELECT json_extract(value, '$.k') AS k FROM json_each(:rows)) u \
CROSS JOIN {policy_state} p ON p.scope = :scope AND p."key" = u.k
