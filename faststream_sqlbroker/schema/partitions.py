"""Time partitions of the archive on PostgreSQL: created ahead, dropped when they are old.

There is always a DEFAULT partition, so a message is archived even without a partition for its
time. Rows of the DEFAULT partition are deleted one by one, as in an archive without partitions.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Table, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex

from faststream_sqlbroker.core.times import MIN_TIMESTAMP, from_microseconds
from faststream_sqlbroker.exceptions import NotSupportedError, SchemaError
from faststream_sqlbroker.schema.config import (
    SqlBrokerSchemaConfig,
    get_next_partition_start,
    get_partition_start,
    list_required_partitions,
)
from faststream_sqlbroker.schema.tables import build_tables, list_indexes

LOCK_TIMEOUT = "2s"
"""Maximum wait of a change of the partitions for its locks: later statements wait behind it."""
KEY_SUFFIX = "by_id"
FIRST_SUFFIX = "p0"
CHECK_SUFFIX = "until"
"""Suffixes of a conversion after the archive's name: the unique index, the partition with the
existing rows, and the check that these are older than the partition's end."""
_FIRST_TIME = from_microseconds(MIN_TIMESTAMP)
_BOUNDS = re.compile(r"FOR VALUES FROM \((MINVALUE|'[^']*')\) TO \('([^']*)'\)")
_LIST_PARTITIONS = """
SELECT c.relname, c.oid::regclass::text AS name, pg_get_expr(c.relpartbound, c.oid) AS bounds
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass(:archive) ORDER BY name
"""
_IS_PARTITIONED = "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(:archive)"
_GRANTS = """
SELECT format('GRANT %s ON {new} TO %s%s', a.privilege_type,
  CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
  CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
FROM pg_class c, aclexplode(c.relacl) a WHERE c.oid = to_regclass('{old}')
UNION ALL
SELECT format('GRANT %s (%I) ON {new} TO %s%s', a.privilege_type, t.attname,
  CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
  CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
FROM pg_attribute t, aclexplode(t.attacl) a WHERE t.attrelid = to_regclass('{old}')
"""


@dataclass(frozen=True, slots=True)
class ArchivePartition:
    """A partition of the archive."""

    name: str
    """Quoted name for SQL."""
    start: datetime
    """First time in the partition; without a lower bound, the first time that Python supports."""
    end: datetime
    """First time after the partition."""


def is_partitioned(connection: Connection, archive: Table | None) -> bool:
    """Return True if the archive in the database has partitions."""
    if archive is None or connection.dialect.name != "postgresql":
        return False
    kind = connection.execute(text(_IS_PARTITIONED), {"archive": _quote_name(archive)}).scalar()
    return bool(kind)


def list_partitions(connection: Connection, archive: Table) -> list[ArchivePartition]:
    """Return the partitions with an end, the oldest first, without the DEFAULT partition.

    Sets the time zone of the transaction to UTC.
    """
    # PostgreSQL formats bounds in the session's time zone and date style.
    connection.execute(
        text("SELECT set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO', true)")
    )
    partitions = []
    for _, name, bounds in connection.execute(
        text(_LIST_PARTITIONS), {"archive": _quote_name(archive)}
    ):
        match = _BOUNDS.fullmatch(bounds or "")
        if match is None:
            continue
        with suppress(ValueError):  # infinity, or a date outside of Python's range
            lower = match[1].strip("'")
            start = _FIRST_TIME if lower == "MINVALUE" else datetime.fromisoformat(lower)
            partitions.append(ArchivePartition(name, start, datetime.fromisoformat(match[2])))
    return sorted(partitions, key=lambda partition: partition.end)


def list_partition_names(connection: Connection, archive: Table) -> list[str]:
    """Return the names of all partitions, including the DEFAULT partition, which has no bounds."""
    return list(connection.scalars(text(_LIST_PARTITIONS), {"archive": _quote_name(archive)}))


def add_partition(connection: Connection, config: SqlBrokerSchemaConfig) -> str | None:
    """Create the next missing partition; returns the name, or None if none is missing.

    Call this until it returns None, each time in a transaction of its own. A range is skipped if a
    partition covers a part of it, or if the DEFAULT partition has rows of this range, as these
    would have to be moved.

    Raises:
        SchemaError: the archive has no partitions.
    """
    archive = get_archive(config)
    if not is_partitioned(connection, archive):
        raise SchemaError(format_not_partitioned(archive))
    _set_lock_timeout(connection)
    existing = list_partitions(connection, archive)
    now: datetime = connection.execute(text("SELECT statement_timestamp()")).scalar_one()
    for start, end in list_required_partitions(now, str(config.archive_partitions)):
        if any(partition.end > start and partition.start < end for partition in existing):
            continue
        if _has_default_rows(connection, archive, start, end):
            continue
        name = _quote_name(archive, f"p{start:%Y%m%d}")
        # Create the table separately and attach it: this blocks no reader or writer of the archive.
        copy_options = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
        connection.exec_driver_sql(
            f"CREATE TABLE {name} (LIKE {_quote_name(archive)} {copy_options})"
        )
        bounds = f"FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
        connection.exec_driver_sql(
            f"ALTER TABLE {_quote_name(archive)} ATTACH PARTITION {name} FOR VALUES {bounds}"
        )
        return name
    return None


def drop_partition(
    connection: Connection,
    config: SqlBrokerSchemaConfig,
    before: datetime,
    *,
    empty: bool,
) -> str | None:
    """Drop the oldest partition that ended by `before`; returns the name, or None.

    Call this in a transaction of its own. All rows in the partition are lost; that is far cheaper
    than deleting them one by one.

    Args:
        connection: A connection of the archive's owner.
        config: The tables' names.
        before: Every row of the partition is older than this.
        empty: Drop only a partition without rows.
    """
    archive = get_archive(config)
    _set_lock_timeout(connection)
    for partition in list_partitions(connection, archive):
        if partition.end > before:
            return None
        if empty:
            if not _is_empty(connection, partition.name):
                continue
            # A race: a row may arrive between this check and the drop. So take the lock of the drop
            # now, and check again.
            lock = f"LOCK TABLE ONLY {_quote_name(archive)} IN ACCESS EXCLUSIVE MODE"
            connection.exec_driver_sql(lock)
            if not _is_empty(connection, partition.name):
                return None
        connection.exec_driver_sql(f"DROP TABLE {partition.name}")
        return partition.name
    return None


def _is_empty(connection: Connection, name: str) -> bool:
    return connection.exec_driver_sql(f"SELECT 1 FROM {name} LIMIT 1").first() is None


def convert_archive(connection: Connection, config: SqlBrokerSchemaConfig) -> bool:
    """Convert an archive with rows to a partitioned archive, while messages are archived.

    All existing rows become the first partition; it ends a full period after the current one, and
    no row is written again. The only new structure is a unique index on (id, archived_at), which is
    built concurrently, and then takes the place of the primary key. Only that exchange locks the
    archive, for some milliseconds; it gives up after 2 seconds of waiting. In that case, and after
    an interruption, call the function again: it continues. Until it has finished, nothing must be
    archived after the end of the first partition, so do not leave it half done for long. Rights and
    the owner stay as they were. Indexes, triggers, row security, publications and views of your own
    stay with the first partition: create them again on the archive, or views show no later rows.

    Args:
        connection: In autocommit, of the archive's owner, with `isolation_level="AUTOCOMMIT"`; in
            a revision of Alembic's inside `autocommit_block()`.
        config: With `archive_partitions`.

    Returns:
        True if the archive was converted; False if it had partitions.

    Raises:
        SchemaError: there is no archive.
        NotSupportedError: the database is not PostgreSQL.
        sqlalchemy.exc.DBAPIError: a lock was not free in time, or the user is not the owner.
    """
    check_dialect(connection.dialect.name, config)
    archive = get_archive(config)
    name = _quote_name(archive)
    kind = connection.execute(text(_IS_PARTITIONED), {"archive": name}).scalar()
    if kind is None:
        raise SchemaError(f"archive {name} does not exist: create the tables first")
    if kind:
        return False
    until = f'"{archive.name}_{CHECK_SUFFIX}"'
    _build_key(connection, archive)
    end = _compute_first_end(connection, str(config.archive_partitions))
    _run_with_lock_timeout(connection, f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {until}")
    # With this check, PostgreSQL attaches the partition without reading its rows under the lock.
    check = f"CHECK (archived_at < '{end}') NOT VALID"
    _run_with_lock_timeout(connection, f"ALTER TABLE {name} ADD CONSTRAINT {until} {check}")
    try:
        connection.exec_driver_sql(f"ALTER TABLE {name} VALIDATE CONSTRAINT {until}")
        _exchange_tables(connection, archive, end)
    except BaseException:
        # Drop the constraint: it would block the archive once its end has passed.
        with suppress(DBAPIError):
            _run_with_lock_timeout(
                connection, f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {until}"
            )
        raise
    return True


def check_dialect(dialect_name: str, config: SqlBrokerSchemaConfig) -> None:
    """Refuse databases other than PostgreSQL if the archive is to have partitions.

    Raises:
        NotSupportedError: the database is not PostgreSQL.
    """
    if config.archive_partitions is not None and dialect_name != "postgresql":
        raise NotSupportedError(
            f"archive_partitions requires PostgreSQL, and this is {dialect_name}: omit it; "
            "Retention removes old rows on every database"
        )


def _compute_first_end(connection: Connection, size: str) -> str:
    """Return the end of the partition that a conversion makes of the existing rows.

    It is a full period after the current one, because messages are archived into this partition
    until the conversion has finished.
    """
    now: datetime = connection.execute(text("SELECT statement_timestamp()")).scalar_one()
    current_end = get_next_partition_start(get_partition_start(now, size), size)
    return get_next_partition_start(current_end, size).isoformat()


def _build_key(connection: Connection, archive: Table) -> None:
    """Build the unique index, again if an earlier attempt was interrupted.

    The index becomes the primary key of the first partition. Built concurrently, it locks out no
    writer, but PostgreSQL leaves an invalid index after an interrupted CREATE INDEX CONCURRENTLY.
    """
    key = _quote_name(archive, KEY_SUFFIX)
    valid = connection.execute(
        text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:key)"), {"key": key}
    ).scalar()
    if valid is False:
        connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY {key}")
    if not valid:
        name = f'"{archive.name}_{KEY_SUFFIX}"'
        connection.exec_driver_sql(
            f"CREATE UNIQUE INDEX CONCURRENTLY {name} ON {_quote_name(archive)} (id, archived_at)"
        )


def _exchange_tables(connection: Connection, archive: Table, end: str) -> None:
    """Put a partitioned table in the archive's place; the archive becomes the first partition.

    All steps are one transaction, the last step of a conversion. Other sessions wait for the
    archive until it commits. The new table gets the names, rights and owner of the old one.
    """
    old = _quote_name(archive, FIRST_SUFFIX)
    new = _quote_name(archive)
    first = f"{archive.name}_{FIRST_SUFFIX}"
    until = f'"{archive.name}_{CHECK_SUFFIX}"'
    primary_key = inspect(connection).get_pk_constraint(archive.name, schema=archive.schema)["name"]
    copy_options = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
    by_id = f'CONSTRAINT "{primary_key}" PRIMARY KEY (id, archived_at)'
    key = f'"{archive.name}_{KEY_SUFFIX}"'
    indexes = list_indexes(archive)
    steps = [
        f"LOCK TABLE {new} IN ACCESS EXCLUSIVE MODE",
        f'ALTER TABLE {new} DROP CONSTRAINT "{primary_key}"',
        f'ALTER TABLE {new} ADD CONSTRAINT "{first}_pkey" PRIMARY KEY USING INDEX {key}',
        *(_build_index_rename(archive, str(index.name), first) for index in indexes),
        f'ALTER TABLE {new} RENAME TO "{first}"',
        f"CREATE TABLE {new} (LIKE {old} {copy_options}, {by_id}) PARTITION BY RANGE (archived_at)",
        f"ALTER TABLE {new} DROP CONSTRAINT {until}",
        *(str(CreateIndex(index).compile(dialect=connection.dialect)) for index in indexes),
        f"ALTER TABLE {new} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ('{end}')",
        f"ALTER TABLE {old} DROP CONSTRAINT {until}",
        f"CREATE TABLE {_quote_name(archive, 'default')} PARTITION OF {new} DEFAULT",
    ]
    body = ";\n".join(steps)
    owner = f"(SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = '{old}'::regclass)"
    grants = _GRANTS.format(new=new, old=old)
    _run_with_lock_timeout(
        connection,
        f"""{body};
FOR each IN {grants} LOOP EXECUTE each; END LOOP;
EXECUTE format('ALTER TABLE {new} OWNER TO %I', {owner})""",
    )


def _build_index_rename(archive: Table, index: str, first: str) -> str:
    """Return the statement that renames an index, because the new archive needs the name."""
    prefix = "" if archive.schema is None else f'"{archive.schema}".'
    name = index.replace(archive.name, first, 1)
    return f'ALTER INDEX IF EXISTS {prefix}"{index}" RENAME TO "{name}"'


def _run_with_lock_timeout(connection: Connection, statements: str) -> None:
    """Run all or none of `statements`, waiting no longer than `LOCK_TIMEOUT` for locks."""
    # A single statement is one transaction, even in autocommit mode.
    block = f"""DO $run$ DECLARE each text; BEGIN
PERFORM set_config('lock_timeout', '{LOCK_TIMEOUT}', true);
{statements};
END $run$"""
    connection.execute(text(block.replace(":", "\\:")))


def _set_lock_timeout(connection: Connection) -> None:
    setting = text("SELECT set_config('lock_timeout', :most, true)")
    connection.execute(setting, {"most": LOCK_TIMEOUT})


def _has_default_rows(
    connection: Connection, archive: Table, start: datetime, end: datetime
) -> bool:
    """Return True if the DEFAULT partition has rows from `start` to `end`.

    PostgreSQL refuses a partition for a range of which the DEFAULT partition has rows.
    """
    default = connection.execute(
        text("SELECT to_regclass(:name)"), {"name": _quote_name(archive, "default")}
    ).scalar()
    if default is None:
        return False
    query = text(
        f"SELECT 1 FROM {_quote_name(archive, 'default')} "
        "WHERE archived_at >= :start AND archived_at < :end LIMIT 1"
    )
    return connection.execute(query, {"start": start, "end": end}).first() is not None


def get_archive(config: SqlBrokerSchemaConfig) -> Table:
    """Return the definition of the archive, which must have partitions.

    Raises:
        SchemaError: the config has none.
    """
    archive = build_tables(config, dialect_name="postgresql").archive
    if archive is None or config.archive_partitions is None:
        raise SchemaError(
            "SqlBrokerSchemaConfig has no archive with partitions: give archive_partitions="
        )
    return archive


def _quote_name(archive: Table, suffix: str | None = None) -> str:
    """Return the quoted name of the archive, or of the partition `suffix`."""
    name = archive.name if suffix is None else f"{archive.name}_{suffix}"
    return f'"{name}"' if archive.schema is None else f'"{archive.schema}"."{name}"'


def format_not_partitioned(archive: Table) -> str:
    """Return the message for an archive without partitions."""
    return (
        f"{archive.fullname} has no partitions: convert it with faststream_sqlbroker.schema."
        "partitions.convert_archive(connection, config) or `sqlbroker partitions --convert`"
    )
