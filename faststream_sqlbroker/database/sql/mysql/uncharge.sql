-- :ids in
UPDATE {message} FORCE INDEX (PRIMARY) SET deliveries_count = deliveries_count - 1 \
  WHERE id IN :ids
