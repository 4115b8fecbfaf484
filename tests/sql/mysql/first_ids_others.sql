SELECT p.place,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 0) AS id_0,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 1) AS id_1,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 2) AS id_2,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 3) AS id_3,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 4) AS id_4,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 5) AS id_5,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 6) AS id_6,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) FROM message m FORCE INDEX (message_ready)
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 7) AS id_7
FROM JSON_TABLE(:pairs, '$[*]' COLUMNS (
    place FOR ORDINALITY, queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[0]', priority INT PATH '$[1]')) p
HAVING id_0 IS NOT NULL LIMIT :most
