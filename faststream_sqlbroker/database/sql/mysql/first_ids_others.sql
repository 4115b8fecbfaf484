-- Reads the ids of the first due messages of many queues and priorities, for a claim of them all.
-- It passes over suspects: they may have killed their process, or are on their last delivery.
-- It locks nothing; `claim_ids` does so. Where a pair has all 8 ids there may be more, so `claim`
-- is sent for it. Up to 3 pairs are claimed one by one: this would cost more.
SELECT p.place,
  -- Each takes the row first, then asks whether it is due: a search for due rows would read all
  -- that are not. ORDER BY names every column of the index: with fewer, MySQL sorts all rows of a
  -- queue to find the first. No index serves a range whose bound is a column of another row,
  -- and only MySQL has LATERAL, not MariaDB: so each lookup is by equality.
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 0) AS id_0,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 1) AS id_1,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 2) AS id_2,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 3) AS id_3,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 4) AS id_4,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 5) AS id_5,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 6) AS id_6,
  (SELECT IF(m.next_attempt_at <= UTC_TIMESTAMP(6), m.id, NULL) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority
    AND m.deliveries_count - m.attempts_count NOT BETWEEN :losses AND :final \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1 OFFSET 7) AS id_7
FROM JSON_TABLE(:pairs, '$[*]' COLUMNS (
    -- Text without a character set here has the database's, and loses what that cannot hold.
    place FOR ORDINALITY, \
    queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[0]', \
    priority INT PATH '$[1]')) p
HAVING id_0 IS NOT NULL \
LIMIT :most
