-- :ids in
UPDATE {message} SET lease_expires_at = max(lease_expires_at, {now} + :lease) \
  WHERE id IN :ids
