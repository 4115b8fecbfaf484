SELECT id FROM {message} WHERE queue = :queue AND dedup_id = :dedup_id \
  LOCK IN SHARE MODE
