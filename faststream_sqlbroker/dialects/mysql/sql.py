"""MySQL's and MariaDB's statements, with `{names}` to fill in; tests/sql shows them as sent."""

from faststream_sqlbroker.dialects.mysql.settle import UPDATE

INSERT_ROW = (
    "(:queue_{n}, :payload_{n}, :headers_{n}, :priority_{n}, :key_{n}, :dedup_id_{n}, "
    "UTC_TIMESTAMP(6), COALESCE(:at_{n}, UTC_TIMESTAMP(6) + INTERVAL :delay_{n} MICROSECOND), "
    "UTC_TIMESTAMP(6) + INTERVAL :expires_{n} MICROSECOND)"
)

CLAIM = """
SELECT {columns}
FROM {message} FORCE INDEX ({index})
WHERE claimable = 1 AND {of}
  AND next_attempt_at <= UTC_TIMESTAMP(6){which}
ORDER BY next_attempt_at, id LIMIT :limit FOR UPDATE SKIP LOCKED
"""

_CLAIM_UPDATE = """
UPDATE {message} FORCE INDEX (PRIMARY)
SET state = 'PROCESSING', acquired_at = :now, lease_token = :token,
  lease_expires_at = UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND, \
deliveries_count = deliveries_count + 1
WHERE id IN :ids
"""

PLAIN = {
    "update": UPDATE,
    # By IN it would scan a small table: a DELETE of one table takes no hint.
    "delete": "DELETE m FROM JSON_TABLE(:ids, '$[*]' COLUMNS (id BIGINT PATH '$')) u\n"
    "STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id",
    "payload": "UPDATE {message} SET payload = :payload WHERE id = :id",
    "headers": "UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (\n"
    "    id BIGINT PATH '$[0]', headers LONGTEXT CHARACTER SET utf8mb4 PATH '$[1]')) u\n"
    "STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = u.id SET m.headers = u.headers",
    "now": "SELECT UTC_TIMESTAMP(6)",
    # Where MySQL and MariaDB say this differently, both still know the older way.
    "dedup_id": "SELECT id FROM {message} WHERE queue = :queue AND dedup_id = :dedup_id "
    "LOCK IN SHARE MODE",
    "id_step": "SELECT @@auto_increment_increment",
    "start": "START TRANSACTION",
    "lock_wait": "SET @sqlbroker_wait = @@innodb_lock_wait_timeout, "
    "SESSION innodb_lock_wait_timeout = :seconds",
    "lock_wait_again": "SET SESSION innodb_lock_wait_timeout = @sqlbroker_wait",
    "read_committed": "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
}
_LEASED_IN = "SELECT id FROM {message} FORCE INDEX ({leased_index})\nWHERE queue IN :queues AND "
BY_QUEUES = {
    # The names are given as constants: with a join MySQL would read all rows of a queue that has
    # no lease.
    "lease_ends_in": "SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), "
    "MIN(lease_expires_at)) / 1000000\n"
    "FROM {message} FORCE INDEX ({leased_index})\n"
    "WHERE queue IN :queues AND lease_expires_at IS NOT NULL",
    "stuck": _LEASED_IN
    + "lease_expires_at < COALESCE(CAST(:before AS DATETIME(6)), UTC_TIMESTAMP(6))\n"
    "LIMIT :limit FOR UPDATE SKIP LOCKED",
    # FOR UPDATE would wait for every lease of the queues, which a handler's transaction may have
    # locked for long.
    "claimed_by": _LEASED_IN + "lease_expires_at IS NOT NULL AND lease_token = :token",
}
# Without this hint the server scans a table of a few rows, and waits for rows that another
# transaction has locked.
PRIMARY = "FORCE INDEX (PRIMARY)"
_HELD = "SELECT id, lease_token FROM {message} " + PRIMARY + " WHERE id IN :ids"
BY_IDS = {
    "claim_update": _CLAIM_UPDATE,
    "lock": _HELD + " ORDER BY id FOR UPDATE",
    "lock_free": _HELD + " ORDER BY id FOR UPDATE SKIP LOCKED",
    "look": _HELD,
    "renew": "UPDATE {message} " + PRIMARY + "\nSET lease_expires_at = "
    "GREATEST(lease_expires_at, UTC_TIMESTAMP(6) + INTERVAL :lease MICROSECOND)\n"
    "WHERE id IN :ids",
    "uncharge": "UPDATE {message} "
    + PRIMARY
    + " SET deliveries_count = deliveries_count - 1 WHERE id IN :ids",
    "release_stuck": "UPDATE {message} " + PRIMARY + "\n"
    "SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,\n"
    "  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,\n"
    "  policy_marks = policy_marks & {kept_marks}\nWHERE id IN :ids",
}

ORDERED = {
    "now": "UTC_TIMESTAMP(6)",
    "claimable": "m.claimable = 1",
    "after": "m.next_attempt_at >= :due AND (m.next_attempt_at > :due OR m.id > :id)",
    "due_in": "TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(m.next_attempt_at)) / 1000000",
    "id_hint": PRIMARY,
    "open": "",
    "close": "",
}
