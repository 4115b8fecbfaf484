-- variants: free
-- :ids in
SELECT id, lease_token FROM {message} FORCE INDEX (PRIMARY) WHERE id IN :ids \
  ORDER BY id FOR UPDATE  --? !free
  ORDER BY id FOR UPDATE SKIP LOCKED  --? free
