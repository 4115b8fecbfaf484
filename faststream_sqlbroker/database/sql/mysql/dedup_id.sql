-- Waits until no other transaction holds a dedup_id, before a message is published on ack.
-- It locks the row alone. An INSERT that waits for a duplicate also locks the gap before it. All
-- messages of that queue without a dedup_id belong in this gap, so no transaction could publish
-- them until the wait is over.
-- Where MySQL and MariaDB say LOCK IN SHARE MODE differently, both still know this older way.
SELECT id FROM {message} WHERE queue = :queue AND dedup_id = :dedup_id LOCK IN SHARE MODE
