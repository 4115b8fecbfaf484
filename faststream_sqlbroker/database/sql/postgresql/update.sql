-- variants: anew, inside
-- :ids bigint[] :tokens uuid[] :states varchar[] :attempts int[] :charges int[] :ends float[]
-- :delays float[] :errors text[] :queues varchar[] :payloads bytes[] :headers text[]
-- :published int[] :hops int[] :new_keys text[] :one int
-- Ends deliveries whose messages stay: each row whose lease is still held waits again, in its queue
-- or, with a new one, as a message that was never delivered there.
-- Each array is one bind, so the text is the same for every size of a batch, and stays prepared.
UPDATE {message} m
SET state = coalesce(u.state, CASE WHEN m.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  attempts_count = CASE WHEN u.queue IS NULL THEN m.attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN m.deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN m.next_attempt_at
    ELSE statement_timestamp() + u.delay * interval '1 second' END,
  first_attempt_at = CASE WHEN u.queue IS NULL
    THEN coalesce(m.first_attempt_at, m.acquired_at + u.ended * interval '1 second') END,
  last_attempt_at = CASE WHEN u.queue IS NULL
    THEN coalesce(m.acquired_at + u.ended * interval '1 second', m.last_attempt_at) END,
  last_error = coalesce(u.error, m.last_error), publish_count = m.publish_count + u.published,
  hops = coalesce((m.hops + 1) * u.hop, m.hops),
  policy_marks = CASE WHEN u.queue IS NULL THEN m.policy_marks & {kept_marks} ELSE 0 END,
  queue = coalesce(u.queue, m.queue),
  key = CASE WHEN u.new_key IS NULL THEN m.key ELSE nullif(u.new_key, '') END,
  dedup_id = CASE WHEN u.queue IS NULL THEN m.dedup_id END,
  payload = coalesce(u.payload, m.payload),
  headers = coalesce(u.headers::jsonb, m.headers)
FROM unnest(:ids, :tokens, :states, :attempts, :charges, :ends, :delays, :errors, \
    :queues, :payloads, :headers,
    :published, :hops, :new_keys)
  AS u(id, token, state, attempts, charge, ended, delay, error, \
    queue, payload, headers, published, hop, new_key)
-- anew, which is sent for one message, is planned anew each time. Its condition always holds (`one`
-- is 1). Without the value the planner expects a million rows of the two series, so a generic plan
-- always seems to cost more.
-- inside writes nothing unless it runs in the transaction of that number.
WHERE m.id = u.id \
    AND (SELECT count(*)  --? anew
    FROM generate_series(1, :one) AS a, generate_series(1, :one) AS b) > 0  --? anew
    AND pg_current_xact_id_if_assigned() = (:transaction)::text::xid8 \  --? inside
    AND m.lease_token = u.token
RETURNING m.id
