-- Finds the queues and priorities that have claimable messages, and when the first of each is due.
-- A few searches of the index for each queue, however many messages there are. Neither MySQL nor
-- MariaDB can use an index for a range whose bound is a column of another row, and only MySQL has
-- LATERAL. So each lookup is by equality, in the order of the index.
-- ORDER BY names every column of the index: with fewer, MySQL sorts all rows of a queue to find
-- the first. `claimable`, which leads the index, is 1 or NULL.
WITH RECURSIVE q AS (
  -- The highest priority of each queue.
  SELECT q.place, q.queue, \
    (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = q.queue \
    ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC, m.next_attempt_at DESC, m.id DESC \
    LIMIT 1) AS top
  -- Text without a character set here has the database's, and loses what that cannot hold.
  FROM JSON_TABLE(:queues, '$[*]' \
    COLUMNS (place FOR ORDINALITY, \
             queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$')) q
), p AS (
  -- Each priority from the highest to the lowest: mostly one, at most 201 (the table's CHECK).
  SELECT q.place, q.queue, q.top AS priority, \
    (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = q.queue \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1) AS bottom
  FROM q WHERE q.top IS NOT NULL
  UNION ALL
  SELECT p.place, p.queue, p.priority - 1, p.bottom FROM p WHERE p.priority > p.bottom
)
-- Seconds until the first message is due; NULL, which the caller drops: there is no message.
-- A zero date counts as long past: it sorts first, and as NULL would hide the rest of its pair.
SELECT p.queue, p.priority, \
  TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), \
    (SELECT IF(m.next_attempt_at < '1000-01-01', '1000-01-01', m.next_attempt_at) \
    FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p.queue AND m.priority = p.priority \
    ORDER BY m.claimable, m.queue, m.priority, m.next_attempt_at, m.id LIMIT 1)) / 1000000
FROM p ORDER BY p.place, p.priority DESC
