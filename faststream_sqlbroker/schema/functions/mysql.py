"""The procedures and the function of MySQL and MariaDB.

They run with the rights of their definer. Procedures have no default arguments, so all optional
values are in one JSON object. A body of several statements is one transaction: the caller's, or
its own if the caller has none.
"""

from typing import Any

from sqlalchemy.dialects import mysql

from faststream_sqlbroker.schema.functions.names import (
    INVALID_QUEUE,
    MAX_LENGTH,
    UNCHANGED_COLUMNS,
    build_parts,
)
from faststream_sqlbroker.schema.tables import Tables

_TEXT = "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
_OPTIONS = {
    "headers": ("'OBJECT'", "a JSON object"),
    "priority": ("'INTEGER'", "a whole number"),
    "key": ("'STRING'", "a text"),
    "dedup_id": ("'STRING'", "a text"),
    "delay": ("'INTEGER', 'DOUBLE', 'DECIMAL'", "seconds"),
    "due_at": ("'STRING'", "a text such as 2026-03-01 12:00:00, in UTC"),
    "expires_in": ("'INTEGER', 'DOUBLE', 'DECIMAL'", "seconds"),
    "correlation_id": ("'STRING'", "a text"),
    "reply_to": ("'STRING'", "a text"),
}
"""The options, their allowed JSON types, and the description of these types."""

_TIME_PATTERN = "^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?)?$"
"""No other format, and no offset: MySQL would convert it to the session's time zone."""


def _build_check(condition: str, text: str) -> str:
    """Return statements that raise `text`, an expression, if `condition` is true.

    Both are SQL of a stored procedure.
    """
    return (
        f"  IF {condition} THEN\n"
        # The server refuses longer text.
        f"    SET v_text = LEFT({text}, 128);\n"
        "    SIGNAL SQLSTATE '22023' SET MESSAGE_TEXT = v_text;\n"
        "  END IF;\n"
    )


def _build_option_reader() -> str:
    """Return statements that check the options and assign the variables.

    They are part of the procedures that publish, whose argument `p_options` is a JSON object. Each
    option has its own variable.
    """
    paths = ", ".join(f"'$.{name}'" for name in _OPTIONS)
    sql = _build_check(
        "JSON_VALID(p_options) = 0 OR JSON_TYPE(p_options) <> 'OBJECT'",
        "CONCAT('options must be NULL or a JSON object, got ', p_options)",
    )
    sql += f"  SET v_text = JSON_REMOVE(p_options, {paths});\n"
    sql += _build_check("JSON_LENGTH(v_text) > 0", "CONCAT('unknown options ', JSON_KEYS(v_text))")
    for name, (types, meaning) in _OPTIONS.items():
        sql += f"  SET v_json = JSON_EXTRACT(p_options, '$.{name}');\n"
        sql += _build_check(
            f"JSON_TYPE(v_json) NOT IN ('NULL', {types})",
            f"CONCAT('{name} must be {meaning}, got ', v_json)",
        )
        # JSON's null means that the option was left out.
        value = "v_json" if name == "headers" else "JSON_UNQUOTE(v_json)"
        sql += f"  SET v_{name} = IF(JSON_TYPE(v_json) = 'NULL', NULL, {value});\n"
    return sql


def _build_value_checks() -> str:
    """Return statements that refuse values which cannot be stored.

    They follow the assignment of the options in the procedures that publish.
    """
    sql = ""
    for name in ("queue", "key", "dedup_id"):
        variable = f"v_{name}"
        length = f"CHAR_LENGTH({variable}) NOT BETWEEN 1 AND {MAX_LENGTH}"
        missing = "v_queue IS NULL OR " if name == "queue" else ""
        sql += _build_check(
            f"{missing}{length} OR {variable} LIKE '% ' OR LOCATE(CHAR(0), {variable})",
            f"CONCAT('{name} must be a text of 1 to {MAX_LENGTH} characters without NUL and "
            f"without a space at its end, got ', COALESCE(QUOTE({variable}), 'NULL'))",
        )
    checks = (
        (
            f"v_queue REGEXP '{INVALID_QUEUE}'",
            "CONCAT('queue must be no template with a name in braces, . or .., got ', v_queue)",
        ),
        ("p_body IS NULL", "'body cannot be NULL: an empty body is an empty text'"),
        (
            "v_priority NOT BETWEEN -100 AND 100",
            "CONCAT('priority must be from -100 to 100, got ', v_priority)",
        ),
        ("v_delay IS NOT NULL AND v_due_at IS NOT NULL", "'give delay or due_at, not both'"),
        (
            f"v_due_at NOT REGEXP '{_TIME_PATTERN}'",
            "CONCAT('due_at must be a text such as 2026-03-01 12:00:00, in UTC, got ', v_due_at)",
        ),
        (
            "v_expires_in <= 0",
            "CONCAT('expires_in must be more than 0 seconds, got ', v_expires_in)",
        ),
    )
    return sql + "".join(_build_check(*check) for check in checks)


_PUBLISH_BYTES = """
CREATE PROCEDURE {publish_bytes}(
  IN p_queue {text},
  IN p_body LONGBLOB,
  IN p_content_type {text},
  IN p_options JSON,
  OUT p_id BIGINT
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT '{comment}'
BEGIN
  DECLARE v_queue, v_key, v_dedup_id, v_due_at, v_headers, v_correlation_id, v_reply_to, v_json,
    v_text {text};
  DECLARE v_priority INT;
  DECLARE v_delay, v_expires_in DECIMAL(20, 6);
  DECLARE v_now, v_due, v_expires_at DATETIME(6);
  SET p_id = NULL, v_queue = p_queue, v_now = UTC_TIMESTAMP(6);
{read_options}{check_values}  SET v_due = CASE
    WHEN v_delay > 0 THEN v_now + INTERVAL ROUND(v_delay * 1000000) MICROSECOND
    WHEN v_due_at IS NOT NULL THEN CAST(v_due_at AS DATETIME(6))
    ELSE v_now END;
  SET v_expires_at = v_now + INTERVAL ROUND(v_expires_in * 1000000) MICROSECOND;
{check_times}  SET v_headers = COALESCE(v_headers, '{{}}');
  -- JSON_INSERT leaves what the caller's headers have.
  IF p_content_type IS NOT NULL THEN
    SET v_headers = JSON_INSERT(v_headers, '$."content-type"', p_content_type);
  END IF;
  IF v_correlation_id IS NOT NULL THEN
    SET v_headers = JSON_INSERT(v_headers, '$.correlation_id', v_correlation_id);
  END IF;
  IF v_reply_to <> '' THEN
    SET v_headers = JSON_INSERT(v_headers, '$.reply_to', v_reply_to);
  END IF;
  BEGIN
    -- Another live message has the dedup_id: InnoDB undoes this statement alone.
    DECLARE EXIT HANDLER FOR 1062 SET p_id = NULL;
    INSERT INTO {message} (queue, payload, headers, priority, `key`, dedup_id, created_at,
      next_attempt_at, expires_at)
    VALUES (v_queue, p_body, NULLIF(v_headers, '{{}}'), COALESCE(v_priority, 0), v_key,
      v_dedup_id, v_now, v_due, v_expires_at);
    SET p_id = LAST_INSERT_ID();
  END;
END
"""
_PUBLISH = """
CREATE PROCEDURE {publish}(
  IN p_queue {text},
  IN p_body JSON,
  IN p_options JSON,
  OUT p_id BIGINT
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT '{comment}'
BEGIN
  DECLARE v_text {text};
{valid}  CALL {publish_bytes}(p_queue, CONVERT(p_body USING utf8mb4), 'application/json', p_options,
    p_id);
END
"""
# A savepoint only exists within a transaction; otherwise its release fails. So the procedure
# detects a transaction of the caller, which it must not end.
_CANCEL = """
CREATE PROCEDURE {cancel}(
  IN p_id BIGINT,
  IN p_why {text},
  OUT p_cancelled BOOLEAN
) MODIFIES SQL DATA SQL SECURITY DEFINER COMMENT '{comment}'
BEGIN
  DECLARE v_alone BOOLEAN DEFAULT FALSE;
  DECLARE v_found BIGINT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN
    IF v_alone THEN
      ROLLBACK;
    END IF;
    RESIGNAL;
  END;
  BEGIN
    DECLARE CONTINUE HANDLER FOR 1305 SET v_alone = TRUE;
    SAVEPOINT sqlbroker_cancel;
    RELEASE SAVEPOINT sqlbroker_cancel;
  END;
  IF v_alone THEN
    START TRANSACTION;
  END IF;
  -- Skipped, not waited for: a handler's transaction may hold its row for as long as it runs.
  SET v_found = (SELECT id FROM {message} WHERE id = p_id AND state IN ({claimable})
    FOR UPDATE SKIP LOCKED);
{archived}  DELETE FROM {message} WHERE id = v_found;
  SET p_cancelled = v_found IS NOT NULL;
  IF v_alone THEN
    COMMIT;
  END IF;
END
"""
_ARCHIVED = """\
  INSERT INTO {archive} ({columns}, state, archived_at, reason, last_error)
  SELECT {columns}, 'DISCARDED', UTC_TIMESTAMP(6), '{reason}',
    CONCAT('cancelled by ', USER(), COALESCE(CONCAT(': ', p_why), ''),
      COALESCE(CONCAT(CHAR(10), last_error), ''))
  FROM {message} WHERE id = v_found;
"""
_LOAD = """
CREATE FUNCTION {load}(p_queue VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)
RETURNS BIGINT READS SQL DATA SQL SECURITY DEFINER COMMENT '{comment}'
BEGIN
  DECLARE v_level INT;
  DECLARE v_counted, v_total BIGINT DEFAULT 0;
  DECLARE v_left BIGINT DEFAULT {most};
  IF EXISTS (SELECT 1 FROM {policy_state} s WHERE s.scope = 'paused' AND s.`key` = p_queue
      AND (s.expires_at IS NULL OR s.expires_at > UTC_TIMESTAMP(6))) THEN
    RETURN 0;
  END IF;
  SET v_level = (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
    WHERE m.claimable = 1 AND m.queue = p_queue
    ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC LIMIT 1);
  WHILE v_level IS NOT NULL AND v_left > 0 DO
    SELECT COUNT(*) INTO v_counted FROM (
      SELECT 1 FROM {message} m FORCE INDEX ({ready_index})
      WHERE m.claimable = 1 AND m.queue = p_queue AND m.priority = v_level
        AND m.next_attempt_at <= UTC_TIMESTAMP(6) LIMIT v_left) AS due;
    SET v_total = v_total + v_counted, v_left = v_left - v_counted;
    SET v_level = (SELECT m.priority FROM {message} m FORCE INDEX ({ready_index})
      WHERE m.claimable = 1 AND m.queue = p_queue AND m.priority < v_level
      ORDER BY m.claimable DESC, m.queue DESC, m.priority DESC LIMIT 1);
  END WHILE;
  SELECT COUNT(*) INTO v_counted FROM (
    SELECT 1 FROM {message} m FORCE INDEX ({leased_index})
    WHERE m.queue = p_queue AND m.lease_expires_at IS NOT NULL LIMIT v_left) AS running;
  RETURN v_total + v_counted;
END
"""


def build_statements(tables: Tables) -> list[str]:
    """Return the statements that create or replace the procedures and the function.

    The SQL is made from templates; `parts` has the values by placeholder.
    """
    make: Any = mysql.dialect
    quote = make().identifier_preparer.quote_identifier
    config = tables.config
    prefix = "" if config.schema is None else quote(config.schema) + "."

    def quote_name(name: str) -> str:
        return f"{prefix}{quote(name)}"

    table = tables.message.name
    parts = {
        **build_parts(tables, quote_name),
        "text": _TEXT,
        "columns": ", ".join(f"`{name}`" for name in UNCHANGED_COLUMNS),
        "ready_index": quote(f"{table}_ready"),
        "leased_index": quote(f"{table}_leased"),
    }
    parts["archived"] = _ARCHIVED.format(**parts) if parts["archive"] else ""
    parts["read_options"] = _build_option_reader()
    parts["check_values"] = _build_value_checks()
    is_invalid_time = "v_due IS NULL OR (v_expires_in IS NOT NULL AND v_expires_at IS NULL)"
    parts["check_times"] = _build_check(
        is_invalid_time, "'a time is beyond the year 9999, or no time at all'"
    )
    parts["valid"] = _build_check(
        "JSON_VALID(p_body) = 0", "CONCAT('body must be JSON, got ', p_body)"
    )
    statements = []
    for name, body in (
        ("publish_bytes", _PUBLISH_BYTES),
        ("publish", _PUBLISH),
        ("cancel", _CANCEL),
        ("load", _LOAD),
    ):
        kind = "FUNCTION" if name == "load" else "PROCEDURE"
        # MySQL has no CREATE OR REPLACE for routines.
        statements.append(f"DROP {kind} IF EXISTS {parts[name]}")
        statements.append(body.format(**parts).strip())
    return statements
