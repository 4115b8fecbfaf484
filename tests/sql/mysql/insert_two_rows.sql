INSERT INTO message (queue, payload, headers, priority, `key`, dedup_id, created_at, next_attempt_at, expires_at)
VALUES (:queue_0, :payload_0, :headers_0, :priority_0, :key_0, :dedup_id_0, UTC_TIMESTAMP(6), COALESCE(:at_0, UTC_TIMESTAMP(6) + INTERVAL :delay_0 MICROSECOND), UTC_TIMESTAMP(6) + INTERVAL :expires_0 MICROSECOND),
(:queue_1, :payload_1, :headers_1, :priority_1, :key_1, :dedup_id_1, UTC_TIMESTAMP(6), COALESCE(:at_1, UTC_TIMESTAMP(6) + INTERVAL :delay_1 MICROSECOND), UTC_TIMESTAMP(6) + INTERVAL :expires_1 MICROSECOND)
