"""The archive in partitions of time, on PostgreSQL: made ahead, dropped when they are old.

There is always a DEFAULT partition, so a message is archived whether or not its partition is
there. What it holds is deleted row by row, as in an archive without partitions.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Table, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateIndex

from faststream_sqlbroker.exceptions import NotSupportedError, SchemaError
from faststream_sqlbroker.schema.config import (
    SqlBrokerSchemaConfig,
    next_partition_start,
    partition_start,
    partitions_wanted,
)
from faststream_sqlbroker.schema.tables import build_tables, sorted_indexes

LOCK_TIMEOUT = "2s"
"""Most time that a change of the partitions waits for its locks: what comes later waits behind it.
"""
KEY = "by_id"
FIRST = "p0"
UNTIL = "until"
"""Of a conversion, each after the archive's name: the unique index, the partition with the rows
that were there, and the check that these are older than its end."""
_BOUNDS = re.compile(r"FOR VALUES FROM \((MINVALUE|'[^']*')\) TO \('([^']*)'\)")
_FIND = """
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
    """One partition of the archive."""

    name: str
    """As SQL takes it."""
    start: datetime | None
    """Its first moment; None: it has no begin."""
    end: datetime
    """The first moment that does not belong to it."""


def is_partitioned(connection: Connection, archive: Table | None) -> bool:
    """Whether the archive in the database has partitions."""
    if archive is None or connection.dialect.name != "postgresql":
        return False
    found = connection.execute(text(_IS_PARTITIONED), {"archive": _named(archive)}).scalar()
    return bool(found)


def list_partitions(connection: Connection, archive: Table) -> list[ArchivePartition]:
    """Those with an end, the oldest first; the DEFAULT one and those without an end are left out.

    Sets the time zone of the transaction to UTC.
    """
    # PostgreSQL writes bounds in the session's zone and style.
    connection.execute(
        text("SELECT set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO', true)")
    )
    found = []
    for _, name, bounds in connection.execute(text(_FIND), {"archive": _named(archive)}):
        match = _BOUNDS.fullmatch(bounds or "")
        if match is None:
            continue
        with suppress(ValueError):  # infinity, or a date that Python does not have
            first = match[1].strip("'")
            start = None if first == "MINVALUE" else datetime.fromisoformat(first)
            found.append(ArchivePartition(name, start, datetime.fromisoformat(match[2])))
    return sorted(found, key=lambda each: each.end)


def partition_names(connection: Connection, archive: Table) -> list[str]:
    """The names of all partitions, the DEFAULT one, too."""
    return list(connection.scalars(text(_FIND), {"archive": _named(archive)}))


def add_partition(connection: Connection, config: SqlBrokerSchemaConfig) -> str | None:
    """Make the next of the partitions that are missing; its name, or None: none is missing.

    Call it in a transaction of its own. Ranges of which a partition has a part are left to it; and
    so is a range of which the DEFAULT partition has rows, as they would have to be moved.

    Raises:
        SchemaError: the archive has no partitions.
    """
    archive = archive_of(config)
    if not is_partitioned(connection, archive):
        raise SchemaError(not_partitioned(archive))
    _wait_little(connection)
    there = list_partitions(connection, archive)
    now: datetime = connection.execute(text("SELECT statement_timestamp()")).scalar_one()
    for start, end in partitions_wanted(now, str(config.archive_partitions)):
        if any(each.end > start and (each.start is None or each.start < end) for each in there):
            continue
        if _default_has(connection, archive, start, end):
            continue
        name = _named(archive, f"p{start:%Y%m%d}")
        # Made apart and attached: that locks the archive against no reader and no writer.
        copied = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
        connection.exec_driver_sql(f"CREATE TABLE {name} (LIKE {_named(archive)} {copied})")
        bounds = f"FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
        connection.exec_driver_sql(
            f"ALTER TABLE {_named(archive)} ATTACH PARTITION {name} FOR VALUES {bounds}"
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
    """Drop the oldest partition that ended by `before`; its name, or None: there is none.

    Call it in a transaction of its own. All rows in it are lost.

    Args:
        connection: Of the archive's owner.
        config: The tables' names.
        before: Every row of the partition is older.
        empty: Only one without rows.
    """
    archive = archive_of(config)
    _wait_little(connection)
    for each in list_partitions(connection, archive):
        if each.end > before:
            return None
        if empty:
            if not _is_empty(connection, each.name):
                continue
            # A row may come between the look and the drop, which takes this lock, too.
            lock = f"LOCK TABLE ONLY {_named(archive)} IN ACCESS EXCLUSIVE MODE"
            connection.exec_driver_sql(lock)
            if not _is_empty(connection, each.name):
                return None
        connection.exec_driver_sql(f"DROP TABLE {each.name}")
        return each.name
    return None


def _is_empty(connection: Connection, name: str) -> bool:
    return connection.exec_driver_sql(f"SELECT 1 FROM {name} LIMIT 1").first() is None


def convert_archive(connection: Connection, config: SqlBrokerSchemaConfig) -> bool:
    """Turn an archive with rows into one with partitions, while messages are archived.

    All rows that there are become the first partition; it ends a whole period after the current
    one, and no row is written anew. What is new is a unique index on (id, archived_at), which is
    built concurrently, and then takes the place of the primary key. Only that exchange locks the
    archive, for some milliseconds; it gives up after 2 seconds of waiting. Call it again then, and
    if it was cut off: it goes on. Until it has ended nothing must be archived after that end, so
    do not leave it half done for long. Rights, and the owner, stay as they were. Indexes,
    triggers, row security, publications and views of your own stay with the first partition: make
    them anew on the archive, or views show no later rows.

    Args:
        connection: In autocommit, of the archive's owner, with `isolation_level="AUTOCOMMIT"`; in
            a revision of Alembic's inside `autocommit_block()`.
        config: With `archive_partitions`.

    Returns:
        Whether it was converted; False: it had partitions.

    Raises:
        SchemaError: there is no archive.
        NotSupportedError: the database is not PostgreSQL.
        sqlalchemy.exc.DBAPIError: a lock was not free in time, or the user is not the owner.
    """
    need_postgresql(connection.dialect.name, config)
    archive = archive_of(config)
    name = _named(archive)
    kind = connection.execute(text(_IS_PARTITIONED), {"archive": name}).scalar()
    if kind is None:
        raise SchemaError(f"there is no archive {name}: create the tables first")
    if kind:
        return False
    until = f'"{archive.name}_{UNTIL}"'
    _build_key(connection, archive)
    end = _first_end(connection, str(config.archive_partitions))
    _run(connection, f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {until}")
    check = f"CHECK (archived_at < '{end}') NOT VALID"
    _run(connection, f"ALTER TABLE {name} ADD CONSTRAINT {until} {check}")
    try:
        connection.exec_driver_sql(f"ALTER TABLE {name} VALIDATE CONSTRAINT {until}")
        _swap(connection, archive, end)
    except BaseException:
        # With it nothing could be archived once that moment has come.
        with suppress(DBAPIError):
            _run(connection, f"ALTER TABLE {name} DROP CONSTRAINT IF EXISTS {until}")
        raise
    return True


def need_postgresql(dialect_name: str, config: SqlBrokerSchemaConfig) -> None:
    """Refuse other databases, if the archive is to have partitions.

    Raises:
        NotSupportedError: it is another one.
    """
    if config.archive_partitions is not None and dialect_name != "postgresql":
        raise NotSupportedError(
            f"archive_partitions is for PostgreSQL only, and this is {dialect_name}: leave it out; "
            "Retention removes old rows on every database"
        )


def _first_end(connection: Connection, size: str) -> str:
    now: datetime = connection.execute(text("SELECT statement_timestamp()")).scalar_one()
    current_end = next_partition_start(partition_start(now, size), size)
    return next_partition_start(current_end, size).isoformat()


def _build_key(connection: Connection, archive: Table) -> None:
    """Build the unique index, or build it anew if an earlier attempt was cut off."""
    key = _named(archive, KEY)
    valid = connection.execute(
        text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:key)"), {"key": key}
    ).scalar()
    if valid is False:
        connection.exec_driver_sql(f"DROP INDEX CONCURRENTLY {key}")
    if not valid:
        name = f'"{archive.name}_{KEY}"'
        connection.exec_driver_sql(
            f"CREATE UNIQUE INDEX CONCURRENTLY {name} ON {_named(archive)} (id, archived_at)"
        )


def _swap(connection: Connection, archive: Table, end: str) -> None:
    """Put a partitioned table in the archive's place, with the archive as its first partition."""
    old = _named(archive, FIRST)
    new = _named(archive)
    first = f"{archive.name}_{FIRST}"
    until = f'"{archive.name}_{UNTIL}"'
    primary_key = inspect(connection).get_pk_constraint(archive.name, schema=archive.schema)["name"]
    copied = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
    by_id = f'CONSTRAINT "{primary_key}" PRIMARY KEY (id, archived_at)'
    key = f'"{archive.name}_{KEY}"'
    indexes = sorted_indexes(archive)
    steps = [
        f"LOCK TABLE {new} IN ACCESS EXCLUSIVE MODE",
        f'ALTER TABLE {new} DROP CONSTRAINT "{primary_key}"',
        f'ALTER TABLE {new} ADD CONSTRAINT "{first}_pkey" PRIMARY KEY USING INDEX {key}',
        *(_renamed(archive, str(each.name), first) for each in indexes),
        f'ALTER TABLE {new} RENAME TO "{first}"',
        f"CREATE TABLE {new} (LIKE {old} {copied}, {by_id}) PARTITION BY RANGE (archived_at)",
        f"ALTER TABLE {new} DROP CONSTRAINT {until}",
        *(str(CreateIndex(each).compile(dialect=connection.dialect)) for each in indexes),
        f"ALTER TABLE {new} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ('{end}')",
        f"ALTER TABLE {old} DROP CONSTRAINT {until}",
        f"CREATE TABLE {_named(archive, 'default')} PARTITION OF {new} DEFAULT",
    ]
    body = ";\n".join(steps)
    owner = f"(SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = '{old}'::regclass)"
    grants = _GRANTS.format(new=new, old=old)
    _run(
        connection,
        f"""{body};
FOR each IN {grants} LOOP EXECUTE each; END LOOP;
EXECUTE format('ALTER TABLE {new} OWNER TO %I', {owner})""",
    )


def _renamed(archive: Table, index: str, first: str) -> str:
    prefix = "" if archive.schema is None else f'"{archive.schema}".'
    name = index.replace(archive.name, first, 1)
    return f'ALTER INDEX IF EXISTS {prefix}"{index}" RENAME TO "{name}"'


def _run(connection: Connection, statements: str) -> None:
    """Run statements that wait for locks no longer than `LOCK_TIMEOUT`, all or none."""
    # One statement is one transaction, also where each commits by itself.
    block = f"""DO $run$ DECLARE each text; BEGIN
PERFORM set_config('lock_timeout', '{LOCK_TIMEOUT}', true);
{statements};
END $run$"""
    connection.execute(text(block.replace(":", "\\:")))


def _wait_little(connection: Connection) -> None:
    setting = text("SELECT set_config('lock_timeout', :most, true)")
    connection.execute(setting, {"most": LOCK_TIMEOUT})


def _default_has(connection: Connection, archive: Table, start: datetime, end: datetime) -> bool:
    default = connection.execute(
        text("SELECT to_regclass(:name)"), {"name": _named(archive, "default")}
    ).scalar()
    if default is None:
        return False
    found = text(
        f"SELECT 1 FROM {_named(archive, 'default')} "
        "WHERE archived_at >= :start AND archived_at < :end LIMIT 1"
    )
    return connection.execute(found, {"start": start, "end": end}).first() is not None


def archive_of(config: SqlBrokerSchemaConfig) -> Table:
    """Return the archive that has partitions.

    Raises:
        SchemaError: there is none.
    """
    archive = build_tables(config, dialect_name="postgresql").archive
    if archive is None or config.archive_partitions is None:
        raise SchemaError(
            "SqlBrokerSchemaConfig names no archive with partitions: give archive_partitions="
        )
    return archive


def _named(archive: Table, suffix: str | None = None) -> str:
    """The name of the archive, or of its partition `suffix`, as SQL takes it."""
    name = archive.name if suffix is None else f"{archive.name}_{suffix}"
    return f'"{name}"' if archive.schema is None else f'"{archive.schema}"."{name}"'


def not_partitioned(archive: Table) -> str:
    """What to do about an archive without partitions."""
    return (
        f"{archive.fullname} has no partitions: faststream_sqlbroker.schema.partitions."
        "convert_archive(connection, config), or `sqlbroker partitions --convert`, turns it into "
        "an archive with them"
    )
