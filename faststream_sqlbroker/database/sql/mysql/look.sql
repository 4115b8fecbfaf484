-- :ids in
-- Reads which leases messages have, locked or not; sent before renewals, and where `lock` skips.
-- Without the hint the server scans a small table.
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY) WHERE id IN :ids
