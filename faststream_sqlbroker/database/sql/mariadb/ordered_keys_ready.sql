-- variants: by_header
-- :queue varchar :mask smallint :start varchar :size int
SELECT k.k, (SELECT m.id FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.{key_column} = k.k AND m.claimable = 1 \
    AND m.next_attempt_at <= UTC_TIMESTAMP(6)
    AND (m.policy_marks & :mask) >= :mask ORDER BY m.id LIMIT 1) AS head
FROM (SELECT DISTINCT m.{key_column} AS k FROM {message} m FORCE INDEX ({key_index})
  WHERE m.queue = :queue AND m.{key_column} >= :start ORDER BY m.{key_column} \
    LIMIT :size) k
ORDER BY k.k
