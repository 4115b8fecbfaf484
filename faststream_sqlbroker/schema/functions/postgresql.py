"""The functions of PostgreSQL.

They run with the rights of their owner (SECURITY DEFINER). So a caller must not be able to
replace anything they use: each table is named with its schema, and only PostgreSQL's own schema
is searched.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.dialects import postgresql

from faststream_sqlbroker.schema.functions.names import (
    COMMENT,
    INVALID_QUEUE,
    MAX_LENGTH,
    UNCHANGED_COLUMNS,
    build_parts,
)
from faststream_sqlbroker.schema.tables import Tables

_HEAD = "SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS "
_OPTIONS = """\
  headers jsonb DEFAULT NULL,
  priority integer DEFAULT 0,
  key text DEFAULT NULL,
  dedup_id text DEFAULT NULL,
  delay interval DEFAULT NULL,
  due_at timestamptz DEFAULT NULL,
  expires_in interval DEFAULT NULL,
  correlation_id text DEFAULT NULL,
  reply_to text DEFAULT NULL,
  notify boolean DEFAULT false"""
_OPTION_TYPES = "jsonb, integer, text, text, interval, timestamptz, interval, text, text, boolean"

# The arguments have the names of columns, so the bodies use $1, $2, and so on.
_PUBLISH_BYTES = """
CREATE OR REPLACE FUNCTION {publish_bytes}(
  queue text,
  body bytea,
  content_type text DEFAULT NULL,
{options}
) RETURNS bigint LANGUAGE plpgsql {head}
#variable_conflict use_column
DECLARE
  name record;
  due timestamptz;
  merged jsonb;
  new_id bigint;
BEGIN
  FOR name IN SELECT * FROM (VALUES ('queue', $1), ('key', $6), ('dedup_id', $7)) AS n(what, given)
  LOOP
    IF length(name.given) NOT BETWEEN 1 AND {longest} OR name.given LIKE '% '
        OR (name.what = 'queue' AND name.given IS NULL) THEN
      RAISE EXCEPTION '% cannot be %: it is a text of 1 to {longest} characters without a space at '
        'its end', name.what, coalesce(quote_literal(name.given), 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END LOOP;
  IF $1 ~ '{no_queue}' THEN
    RAISE EXCEPTION 'queue cannot be %: a name in braces makes it a template, and . and .. are '
      'steps of a path in a URL', quote_literal($1) USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $2 IS NULL THEN
    RAISE EXCEPTION 'body cannot be NULL: an empty body is empty bytes, and JSON has a null of its '
      'own' USING ERRCODE = 'null_value_not_allowed';
  END IF;
  IF jsonb_typeof($4) NOT IN ('object', 'null') THEN
    RAISE EXCEPTION 'headers must be a JSON object, got %', $4
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF coalesce($5, 0) NOT BETWEEN -100 AND 100 THEN
    RAISE EXCEPTION 'priority must be from -100 to 100, got %', $5
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $8 IS NOT NULL AND $9 IS NOT NULL THEN
    RAISE EXCEPTION 'give delay or due_at, not both' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF $10 <= interval '0' THEN
    RAISE EXCEPTION 'expires_in must be longer than 0, got %', $10
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  due := CASE
    WHEN $8 > interval '0' THEN statement_timestamp() + $8
    WHEN $9 IS NOT NULL THEN greatest(least($9, '9999-01-01 00:00+00'), '1000-01-01 00:00+00')
    ELSE statement_timestamp() END;
  merged := jsonb_strip_nulls(jsonb_build_object(
    'content-type', $3, 'correlation_id', $11, 'reply_to', nullif($12, '')))
    || coalesce(nullif($4, 'null'), '{{}}');
  INSERT INTO {message} (queue, payload, headers, priority, key, dedup_id, created_at,
    next_attempt_at, expires_at)
  VALUES ($1, $2, nullif(merged, '{{}}'), coalesce($5, 0), $6, $7, statement_timestamp(), due,
    statement_timestamp() + $10)
  ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING
  RETURNING id INTO new_id;
  IF $13 AND new_id IS NOT NULL AND due <= statement_timestamp() THEN
    PERFORM pg_notify('{channel}', $1);
  END IF;
  RETURN new_id;
END {tag}
"""
_PUBLISH = """
CREATE OR REPLACE FUNCTION {publish}(
  queue text,
  body jsonb,
{options}
) RETURNS bigint LANGUAGE sql {head}
  SELECT {publish_bytes}($1, convert_to($2::text, 'UTF8'), 'application/json',
    $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
{tag}
"""
# Skip a locked row instead of waiting: a handler's transaction may hold its row for a long time.
_CANCEL = """
CREATE OR REPLACE FUNCTION {cancel}(
  id bigint,
  why text DEFAULT NULL
) RETURNS boolean LANGUAGE sql {head}
  WITH waiting AS (
    SELECT m.id FROM {message} m
    WHERE m.id = $1 AND m.state IN ({claimable}) FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM {message} m USING waiting w WHERE m.id = w.id RETURNING m.*
  ){archived}
  SELECT count(*) > 0 FROM gone
{tag}
"""
_ARCHIVED = """, archived AS (
    INSERT INTO {archive} ({columns}, state, archived_at, reason, last_error)
    SELECT {values}, 'DISCARDED', statement_timestamp(), '{reason}',
      concat('cancelled by ', session_user, ': ' || $2, E'\\n' || g.last_error)
    FROM gone g
  )"""
_LOAD = """
CREATE OR REPLACE FUNCTION {load}(
  queue text,
  most integer DEFAULT {most}
) RETURNS bigint LANGUAGE plpgsql STABLE {head}
#variable_conflict use_column
DECLARE
  level smallint;
  counted bigint;
  total bigint := 0;
  room bigint := greatest(coalesce($2, {most}), 0);
BEGIN
  IF EXISTS (SELECT FROM {policy_state} s WHERE s.scope = 'paused' AND s.key = $1
      AND (s.expires_at IS NULL OR s.expires_at > statement_timestamp())) THEN
    RETURN 0;
  END IF;
  SELECT max(m.priority) INTO level FROM {message} m
  WHERE m.queue = $1 AND m.state IN ({claimable});
  WHILE level IS NOT NULL AND total < room LOOP
    SELECT count(*) INTO counted FROM (
      SELECT FROM {message} m
      WHERE m.queue = $1 AND m.priority = level AND m.state IN ({claimable})
        AND m.next_attempt_at <= statement_timestamp()
      LIMIT room - total) AS due;
    total := total + counted;
    SELECT max(m.priority) INTO level FROM {message} m
    WHERE m.queue = $1 AND m.priority < level AND m.state IN ({claimable});
  END LOOP;
  SELECT count(*) INTO counted FROM (
    SELECT FROM {message} m WHERE m.queue = $1 AND m.state = 'PROCESSING'
    LIMIT room - total) AS running;
  RETURN total + counted;
END {tag}
"""


def build_statements(tables: Tables, schema: str) -> list[str]:
    """Return the statements that create or replace the functions in `schema`.

    The SQL is made from templates; `parts` has the values by placeholder.
    """
    make: Any = postgresql.dialect
    quote = make().identifier_preparer.quote_identifier

    def quote_name(name: str) -> str:
        return f"{quote(schema)}.{quote(name)}"

    tag = _find_tag([schema, *(table.name for table in tables.broker_tables)])
    parts = {
        **build_parts(tables, quote_name),
        "head": _HEAD + tag,
        "tag": tag,
        "options": _OPTIONS,
        "longest": MAX_LENGTH,
        "no_queue": INVALID_QUEUE,
        "channel": tables.config.channel,
        "columns": ", ".join(UNCHANGED_COLUMNS),
        "values": ", ".join(f"g.{name}" for name in UNCHANGED_COLUMNS),
    }
    parts["archived"] = _ARCHIVED.format(**parts) if parts["archive"] else ""
    functions = [
        (_PUBLISH_BYTES, f"{parts['publish_bytes']}(text, bytea, text, {_OPTION_TYPES})"),
        (_PUBLISH, f"{parts['publish']}(text, jsonb, {_OPTION_TYPES})"),
        (_CANCEL, f"{parts['cancel']}(bigint, text)"),
        (_LOAD, f"{parts['load']}(text, integer)"),
    ]
    statements = []
    for body, signature in functions:
        statements.append(body.format(**parts).strip())
        # By default every user may call a new function.
        statements.append(f"REVOKE ALL ON FUNCTION {signature} FROM PUBLIC")
        statements.append(f"COMMENT ON FUNCTION {signature} IS '{COMMENT}'")
    return statements


def _find_tag(names: Sequence[str]) -> str:
    """Return the delimiter of the body of a function: names may contain dollar signs, too.

    In PostgreSQL text between two equal tags such as $tag$ needs no quoting.
    """
    tag = "$sqlbroker$"
    while any(tag in name for name in names):
        tag = f"{tag[:-1]}_$"
    return tag
