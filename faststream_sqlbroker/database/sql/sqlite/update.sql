-- Writes the outcome of messages that stay: they are retried, given back, or moved to another
-- queue. It is sent after `lock`.
UPDATE {message}
-- Without a state the message is as before the claim.
SET state = COALESCE(u.state,
    CASE WHEN {message}.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  -- With a queue it moves there: its counts, attempts and marks begin anew, and its dedup_id goes.
  attempts_count = CASE WHEN u.queue IS NULL THEN attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN next_attempt_at ELSE {now} + u.delay END,
  first_attempt_at = CASE WHEN u.queue IS NULL \
    THEN COALESCE(first_attempt_at, acquired_at + u.ended) END,
  last_attempt_at = CASE WHEN u.queue IS NULL \
    THEN COALESCE(acquired_at + u.ended, last_attempt_at) END,
  last_error = COALESCE(u.error, last_error), publish_count = publish_count + u.published,
  -- A hop of 1 counts one more, 0 resets the count, NULL leaves it.
  hops = COALESCE((hops + 1) * u.hop, hops),
  policy_marks = CASE WHEN u.queue IS NULL THEN policy_marks & {kept_marks} ELSE 0 END,
  queue = COALESCE(u.queue, {message}.queue),
  -- A key of '' takes the message's key away, NULL leaves it.
  "key" = CASE WHEN u.new_key IS NULL THEN {message}."key" ELSE NULLIF(u.new_key, '') END,
  dedup_id = CASE WHEN u.queue IS NULL THEN dedup_id END
-- `:rows` is JSON: one array for each message, in the order of `rows_json`. `ended` is the time
-- from the claim to the handler's end, in microseconds; NULL if no handler has ended.
FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS state,
  json_extract(value, '$[2]') AS attempts, json_extract(value, '$[3]') AS charge,
  json_extract(value, '$[4]') AS ended, json_extract(value, '$[5]') AS reason,
  json_extract(value, '$[6]') AS error, json_extract(value, '$[7]') AS delay,
  json_extract(value, '$[8]') AS queue, json_extract(value, '$[9]') AS related_id,
  json_extract(value, '$[10]') AS published, json_extract(value, '$[11]') AS hop,
  json_extract(value, '$[12]') AS fingerprint, json_extract(value, '$[13]') AS new_key
  FROM json_each(:rows)) u
WHERE {message}.id = u.id
