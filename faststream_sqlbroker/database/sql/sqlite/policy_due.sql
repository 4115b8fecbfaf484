-- variants: by_header, one, one by_header, others, others by_header
-- :queue varchar :priority smallint :now bigint :before int :size int :final int :losses int
-- :only bigint
-- Reads the due messages that all policies have seen, for a claim to choose from: all, without
-- suspects (`others`), or only one message (`one`).
-- The key is read as bytes: text that is not UTF-8 would fail the read.
SELECT m.id, CAST(m.{key_column} AS BLOB), m.next_attempt_at
FROM {message} m INDEXED BY {ready_index}
WHERE m.queue = :queue AND m.priority = :priority AND m.state IN ('PENDING', 'RETRYABLE') \
  AND m.next_attempt_at <= {now}
  -- `:now` is when the claim began. A burst that has ended since may lack what arrived after the
  -- policies looked, and before its end.
  AND m.next_attempt_at <= :now AND (m.policy_marks & :before) >= :before
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final  --? others
  AND m.id = :only  --? one
ORDER BY m.next_attempt_at, m.id LIMIT :size
