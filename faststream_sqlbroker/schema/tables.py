"""The tables of the broker, defined once for all databases."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    text,
)
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from faststream_sqlbroker.core.states import (
    ARCHIVED_STATES,
    CLAIMABLE_STATES,
    LIVE_STATES,
    MessageState,
)
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.types import (
    MYSQL,
    ErrorType,
    HeadersType,
    IdType,
    NameType,
    PayloadType,
    TokenType,
    UtcTimestamp,
    clock,
)

AUTOVACUUM = (
    "autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, "
    "autovacuum_vacuum_cost_delay = 0"
)
"""Every message leaves two dead rows. The default threshold is a share of the live rows, of which
an empty queue has none; so PostgreSQL vacuums after a number of dead rows, without a pause."""

_TIMES = ("created_at", "next_attempt_at", "expires_at", "first_attempt_at", "last_attempt_at")
IN_CALENDAR = " AND ".join(f"{name} BETWEEN '1000-01-01' AND '9999-01-01'" for name in _TIMES)
"""A check for PostgreSQL: infinite and far times would break every claim of a queue, as Python has
no such datetimes."""


@dataclass(frozen=True)
class Tables:
    """The tables of a broker; `archive` is None if finished messages are not kept."""

    config: SqlBrokerSchemaConfig
    metadata: MetaData
    message: Table
    archive: Table | None
    policy_state: Table
    version: Table

    @property
    def broker_tables(self) -> tuple[Table, ...]:
        """All tables except Alembic's."""
        archive = () if self.archive is None else (self.archive,)
        return (self.message, *archive, self.policy_state)

    def for_dialect(self, name: str) -> "Tables":
        """Return the same tables with the columns and indexes for the database `name`."""
        return build_tables(self.config, dialect_name=name)


def build_tables(
    config: SqlBrokerSchemaConfig,
    metadata: MetaData | None = None,
    *,
    dialect_name: str | None = None,
) -> Tables:
    """Define the tables named by `config`.

    Args:
        config: Names of the tables.
        metadata: Metadata for the tables; None creates a new one.
        dialect_name: "mysql" and "mariadb" have an additional column and index, as they have no
            partial indexes. Without it and `metadata` the tables only have what statements need,
            and nothing that only their creation needs. With `metadata` they may be created on any
            database.
    """
    if metadata is not None:
        # The application may create its tables on any database, MariaDB under either name.
        options = _DialectOptions(("postgresql", "sqlite", *MYSQL))
    else:
        # SQLAlchemy imports a module for each database that has options: 50 ms each.
        options = _DialectOptions(() if dialect_name is None else (dialect_name,))
    metadata = MetaData() if metadata is None else metadata
    mysql = dialect_name in MYSQL
    archive = config.message_archive_table_name
    return Tables(
        config,
        metadata,
        _build_message_table(config, metadata, options, mysql),
        None
        if archive is None
        else _build_archive_table(config, archive, metadata, options, dialect_name),
        _build_policy_state_table(config, metadata, options),
        Table(
            config.version_table_name,
            metadata,
            Column("version_num", String(32), primary_key=True),
            schema=config.schema,
        ),
    )


def include_tables(
    metadata: MetaData,
    config: SqlBrokerSchemaConfig | None = None,
    *,
    dialect_name: str | None = None,
) -> Tables:
    """Add the broker's tables to `metadata`, for applications that own their migrations.

    Call this where Alembic's `target_metadata` is created; `alembic revision --autogenerate` then
    creates and compares the broker's tables with the application's.

    Args:
        metadata: The application's metadata.
        config: The names given to the broker; default `SqlBrokerSchemaConfig()`.
        dialect_name: Pass "mysql" or "mariadb" for these databases; others need nothing.
    """
    config = config or SqlBrokerSchemaConfig()
    tables = build_tables(config, metadata, dialect_name=dialect_name)
    metadata.remove(tables.version)  # used by the package's own migrations only
    with suppress(ImportError):  # Alembic is not installed
        import_module("faststream_sqlbroker.schema.autogenerate")
    return tables


def build_ddl(tables: Tables, dialect_name: str) -> list[ExecutableDDLElement]:
    """Return the statements that create the tables, in order, for the first migration."""
    tables = tables.for_dialect(dialect_name)
    statements: list[ExecutableDDLElement] = []
    for table in tables.broker_tables:
        statements.append(CreateTable(table))
        has_partitions = table is tables.archive and tables.config.archive_partitions is not None
        if has_partitions and dialect_name == "postgresql":
            statements.append(build_default_partition(table))
        statements += [CreateIndex(index) for index in list_indexes(table)]
    if dialect_name == "postgresql":
        statements.append(build_storage_options(tables.message))
    return statements


def build_default_partition(archive: Table) -> ExecutableDDLElement:
    """Return the statement that creates the archive's DEFAULT partition.

    It takes the rows for whose time there is no partition.
    """
    name = f'"{archive.name}_default"'
    if archive.schema is not None:
        name = f'"{archive.schema}".{name}'
    statement = f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF %(fullname)s DEFAULT"
    return DDL(statement).against(archive)  # type: ignore[no-untyped-call]


def build_storage_options(message: Table) -> ExecutableDDLElement:
    """Return the statement that sets PostgreSQL's storage parameters of the message table."""
    statement = DDL(f"ALTER TABLE %(fullname)s SET ({AUTOVACUUM})")  # type: ignore[no-untyped-call]
    return statement.against(message)


def list_indexes(table: Table) -> list[Index]:
    """Return the indexes of `table`, sorted by name."""
    return sorted(table.indexes, key=lambda index: str(index.name))


def _format_states(states: frozenset[MessageState]) -> str:
    """Return the states as SQL literals, in the order of their definition."""
    return ", ".join(f"'{state.name}'" for state in MessageState if state in states)


def _build_shared_columns(states: frozenset[MessageState], table: str) -> list[Any]:
    """Return the columns of both tables, in the order of the message table.

    `states` are the allowed states: those of live messages, or of archived ones. Only the live
    table has defaults for `state`, `created_at` and `next_attempt_at`, for programs that insert
    messages by plain SQL.
    """
    is_live = MessageState.PENDING in states
    default: dict[str, Any] = {"server_default": clock()} if is_live else {}
    return [
        Column("queue", NameType(255), nullable=False),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("key", NameType(255)),
        Column("dedup_id", NameType(255)),
        Column("headers", HeadersType),
        Column("payload", PayloadType, nullable=False),
        Column(
            "state",
            NameType(16),
            nullable=False,
            server_default=text("'PENDING'") if is_live else None,
        ),
        Column("attempts_count", Integer, nullable=False, server_default=text("0")),
        Column("deliveries_count", Integer, nullable=False, server_default=text("0")),
        Column("publish_count", Integer, nullable=False, server_default=text("1")),
        Column("origin_id", IdType),
        Column("created_at", UtcTimestamp, nullable=False, **default),
        Column("next_attempt_at", UtcTimestamp, nullable=False, **default),
        Column("expires_at", UtcTimestamp),
        Column("first_attempt_at", UtcTimestamp),
        Column("last_attempt_at", UtcTimestamp),
        Column("acquired_at", UtcTimestamp),
        Column("last_error", ErrorType),
        # Number of moves by the broker itself (`core.routing.MAX_HOPS`).
        Column("hops", SmallInteger, nullable=False, server_default=text("0")),
        # The key used by policies, if it differs from the key.
        Column("policy_key", NameType(255)),
        CheckConstraint(f"state IN ({_format_states(states)})", name=f"{table}_state_check"),
    ]


COPIED_COLUMNS = (
    "id",
    *(item.name for item in _build_shared_columns(LIVE_STATES, "") if isinstance(item, Column)),
)
"""Columns of a message that statements copy into the archive, in this order."""


def _build_message_table(
    config: SqlBrokerSchemaConfig, metadata: MetaData, options: "_DialectOptions", mysql: bool
) -> Table:
    """Build the table of live messages, which wait for a delivery or are being handled.

    `options` has the table options of single databases. `mysql` is True for MySQL and MariaDB,
    which have no partial indexes: there the computed column `claimable` is indexed instead.
    """
    name = config.message_table_name
    lease_check = (
        "(state = 'PROCESSING') = (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL)"
    )
    claimable = f"CASE WHEN state IN ({_format_states(CLAIMABLE_STATES)}) THEN 1 END"
    table = Table(
        name,
        metadata,
        Column(
            "id", IdType, *(() if mysql else (Identity(),)), primary_key=True, autoincrement=True
        ),
        *_build_shared_columns(LIVE_STATES, name),
        Column("lease_token", TokenType),
        Column("lease_expires_at", UtcTimestamp),
        # Flags set by policies, as bits (`core.policies.flags`).
        Column("policy_marks", SmallInteger, nullable=False, server_default=text("0")),
        *(
            [Column("claimable", SmallInteger, Computed(claimable, persisted=False))]
            if mysql
            else []
        ),
        CheckConstraint("priority BETWEEN -100 AND 100", name=f"{name}_priority_check"),
        CheckConstraint(
            "attempts_count >= 0 AND deliveries_count >= 0", name=f"{name}_counts_check"
        ),
        CheckConstraint(lease_check, name=f"{name}_lease_check"),
        CheckConstraint(
            "(lease_token IS NULL) = (lease_expires_at IS NULL)", name=f"{name}_token_check"
        ),
        CheckConstraint(IN_CALENDAR, name=f"{name}_times_check").ddl_if(dialect="postgresql"),
        schema=config.schema,
        # Ids are not given again after the latest row was deleted.
        **options.build_table_options(autoincrement=True),
    )
    c = table.c
    build_where = options.build_where
    ready = (
        (c.claimable, c.queue, c.priority, c.next_attempt_at, c.id)
        if mysql
        else (c.queue, c.priority.desc(), c.next_attempt_at, c.id)
    )
    Index(f"{name}_ready", *ready, **build_where(f"state IN ({_format_states(CLAIMABLE_STATES)})"))
    Index(f"{name}_leased", c.queue, c.lease_expires_at, **build_where("state = 'PROCESSING'"))
    has_key = build_where(f"{'`key`' if mysql else 'key'} IS NOT NULL")
    Index(f"{name}_key", c.queue, c.key, c.id, **has_key)
    partial = build_where("policy_key IS NOT NULL")
    Index(f"{name}_policy_key", c.queue, c.policy_key, c.id, **partial)
    # Few messages have a dedup_id; index entries for all messages would cost a quarter of the time
    # of every claim.
    Index(f"{name}_dedup", c.queue, c.dedup_id, unique=True, **build_where("dedup_id IS NOT NULL"))
    return table


def _build_archive_table(
    config: SqlBrokerSchemaConfig,
    name: str,
    metadata: MetaData,
    options: "_DialectOptions",
    dialect_name: str | None,
) -> Table:
    """Build the table of messages that have ended, which have one of the final states.

    On PostgreSQL it may have partitions by `archived_at`.
    """
    has_partitions = config.archive_partitions is not None and dialect_name in (None, "postgresql")
    table = Table(
        name,
        metadata,
        Column("id", IdType, primary_key=True, autoincrement=False),
        *_build_shared_columns(ARCHIVED_STATES, name),
        # A unique index of a partitioned table must contain the partition key.
        Column(
            "archived_at",
            UtcTimestamp,
            nullable=False,
            server_default=clock(),
            primary_key=has_partitions,
        ),
        Column("reason", NameType(255)),
        # Id of the message that the reason refers to, such as the superseding message.
        Column("related_id", IdType),
        # Fingerprint of the last error (`core.settle.compute_fingerprint`).
        Column("error_fingerprint", NameType(16)),
        schema=config.schema,
        **options.build_table_options(
            partition_by="RANGE (archived_at)" if has_partitions else None
        ),
    )
    Index(f"{name}_archived", table.c.archived_at, table.c.id)
    Index(f"{name}_queue", table.c.queue, table.c.archived_at)
    # With partial indexes this index has few rows, because most messages are COMPLETED.
    partial = options.build_where(f"state <> '{MessageState.COMPLETED.name}'")
    c = table.c
    Index(f"{name}_uncompleted", c.state, c.archived_at, c.id, **partial)
    return table


def _build_policy_state_table(
    config: SqlBrokerSchemaConfig, metadata: MetaData, options: "_DialectOptions"
) -> Table:
    """Build the table with a row per (scope, key); `scope` names the policy and its queue.

    It has all state that outlives a message, also that of locks, schedules and subscribers.
    """
    name = config.policy_state_table_name
    table = Table(
        name,
        metadata,
        Column("scope", NameType(300), primary_key=True),
        Column("key", NameType(255), primary_key=True),
        Column("created_at", UtcTimestamp, nullable=False, server_default=clock()),
        Column("lease_token", TokenType),
        Column("lease_expires_at", UtcTimestamp),
        Column("info", HeadersType),
        Column("expires_at", UtcTimestamp),
        # For a lock: the number of times it was acquired; never decreases.
        Column("counter", BigInteger, nullable=False, server_default=text("0")),
        # Time of the next action of a policy for the key.
        Column("due_at", UtcTimestamp),
        schema=config.schema,
        **options.build_table_options(),
    )
    # After expires_at any process may remove the row.
    Index(f"{name}_expiry", table.c.expires_at, **options.build_where("expires_at IS NOT NULL"))
    partial = options.build_where("due_at IS NOT NULL")
    Index(f"{name}_due", table.c.scope, table.c.due_at, **partial)
    return table


class _DialectOptions:
    """The table options that only some databases have, for the databases `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def build_where(self, condition: str) -> dict[str, Any]:
        """Return the options of a partial index, which MySQL and MariaDB do not support."""
        supporting = [name for name in self._names if name not in MYSQL]
        return {f"{name}_where": text(condition) for name in supporting}

    def build_table_options(
        self, *, autoincrement: bool = False, partition_by: str | None = None
    ) -> dict[str, Any]:
        """Return the storage options of a table, for the databases of this object."""
        options: dict[str, Any] = {}
        for name in self._names:
            if name in MYSQL:
                options |= {
                    f"{name}_engine": "InnoDB",
                    f"{name}_charset": "utf8mb4",
                    f"{name}_collate": "utf8mb4_bin",
                }
            elif name == "sqlite" and autoincrement:
                options["sqlite_autoincrement"] = True
            elif name == "postgresql" and partition_by is not None:
                options["postgresql_partition_by"] = partition_by
        return options
