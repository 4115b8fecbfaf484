"""The tables, from one definition for every database."""

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
"""A check of PostgreSQL's: infinite and far times would stop every claim of a queue, as Python has
no such moments."""


@dataclass(frozen=True)
class Tables:
    """The tables of one broker; `archive` is None when nothing finished is kept."""

    config: SqlBrokerSchemaConfig
    metadata: MetaData
    message: Table
    archive: Table | None
    policy_state: Table
    version: Table

    @property
    def ours(self) -> tuple[Table, ...]:
        """All but Alembic's."""
        archive = () if self.archive is None else (self.archive,)
        return (self.message, *archive, self.policy_state)

    def for_dialect(self, name: str) -> "Tables":
        """The same tables with the columns and indexes that the database `name` needs."""
        return build_tables(self.config, dialect_name=name)


def build_tables(
    config: SqlBrokerSchemaConfig,
    metadata: MetaData | None = None,
    *,
    dialect_name: str | None = None,
) -> Tables:
    """Define the tables named by `config`.

    Args:
        config: Their names.
        metadata: Where to define them; None makes a new one.
        dialect_name: "mysql" and "mariadb" have a column and an index of their own, as they have no
            partial indexes. Without it and `metadata` the tables have what statements need, and
            nothing that only their creation does. With `metadata` they may be created on any
            database.
    """
    if metadata is not None:
        # The application may create its tables on any of them, MariaDB under either name.
        options = _Options(("postgresql", "sqlite", *MYSQL))
    else:
        # SQLAlchemy imports the module of each database that an option is for: 50 ms each.
        options = _Options(() if dialect_name is None else (dialect_name,))
    metadata = MetaData() if metadata is None else metadata
    mysql = dialect_name in MYSQL
    archive = config.message_archive_table_name
    return Tables(
        config,
        metadata,
        _message(config, metadata, options, mysql),
        None if archive is None else _archive(config, archive, metadata, options, dialect_name),
        _policy_state(config, metadata, options),
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

    Call it where Alembic's `target_metadata` is made; `alembic revision --autogenerate` then
    creates and compares the broker's tables with the application's.

    Args:
        metadata: The application's.
        config: The names given to the broker; default `SqlBrokerSchemaConfig()`.
        dialect_name: Give "mysql" or "mariadb" there; the others need nothing.
    """
    config = config or SqlBrokerSchemaConfig()
    tables = build_tables(config, metadata, dialect_name=dialect_name)
    metadata.remove(tables.version)  # it belongs to the package's own migrations
    with suppress(ImportError):  # without Alembic nothing is to be told to it
        import_module("faststream_sqlbroker.schema.autogenerate")
    return tables


def ddl(tables: Tables, dialect_name: str) -> list[ExecutableDDLElement]:
    """The statements that create the tables, in order."""
    tables = tables.for_dialect(dialect_name)
    statements: list[ExecutableDDLElement] = []
    for table in tables.ours:
        statements.append(CreateTable(table))
        parts = table is tables.archive and tables.config.archive_partitions is not None
        if parts and dialect_name == "postgresql":
            statements.append(default_partition_of(table))
        statements += [CreateIndex(index) for index in sorted_indexes(table)]
    if dialect_name == "postgresql":
        statements.append(storage_of(tables.message))
    return statements


def default_partition_of(archive: Table) -> ExecutableDDLElement:
    """The statement that makes the archive's partition for what has no other."""
    name = f'"{archive.name}_default"'
    if archive.schema is not None:
        name = f'"{archive.schema}".{name}'
    made = f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF %(fullname)s DEFAULT"
    return DDL(made).against(archive)  # type: ignore[no-untyped-call]


def storage_of(message: Table) -> ExecutableDDLElement:
    """PostgreSQL's storage parameters of the message table."""
    statement = DDL(f"ALTER TABLE %(fullname)s SET ({AUTOVACUUM})")  # type: ignore[no-untyped-call]
    return statement.against(message)


def sorted_indexes(table: Table) -> list[Index]:
    """Indexes of `table` by name."""
    return sorted(table.indexes, key=lambda index: str(index.name))


def _states(states: frozenset[MessageState]) -> str:
    """SQL literals, in the order of the states' definition."""
    return ", ".join(f"'{state.name}'" for state in MessageState if state in states)


def _shared(states: frozenset[MessageState], table: str) -> list[Any]:
    """Columns that a message has before and after its end, in the order of the message table."""
    live = MessageState.PENDING in states
    default: dict[str, Any] = {"server_default": clock()} if live else {}
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
            server_default=text("'PENDING'") if live else None,
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
        # How often the broker itself has moved it on (`core.routing.MOST_HOPS`).
        Column("hops", SmallInteger, nullable=False, server_default=text("0")),
        # What policies work on where it is not the key.
        Column("policy_key", NameType(255)),
        CheckConstraint(f"state IN ({_states(states)})", name=f"{table}_state_check"),
    ]


COPIED_COLUMNS = (
    "id",
    *(each.name for each in _shared(LIVE_STATES, "") if isinstance(each, Column)),
)
"""The columns of a message that statements copy into the archive, by their place."""


def _message(
    config: SqlBrokerSchemaConfig, metadata: MetaData, options: "_Options", mysql: bool
) -> Table:
    name = config.message_table_name
    leased = "(state = 'PROCESSING') = (lease_token IS NOT NULL AND lease_expires_at IS NOT NULL)"
    claimable = f"CASE WHEN state IN ({_states(CLAIMABLE_STATES)}) THEN 1 END"
    table = Table(
        name,
        metadata,
        Column(
            "id", IdType, *(() if mysql else (Identity(),)), primary_key=True, autoincrement=True
        ),
        *_shared(LIVE_STATES, name),
        Column("lease_token", TokenType),
        Column("lease_expires_at", UtcTimestamp),
        # What policies have done with it, as bits (`core.policies.flags`).
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
        CheckConstraint(leased, name=f"{name}_lease_check"),
        CheckConstraint(
            "(lease_token IS NULL) = (lease_expires_at IS NULL)", name=f"{name}_token_check"
        ),
        CheckConstraint(IN_CALENDAR, name=f"{name}_times_check").ddl_if(dialect="postgresql"),
        schema=config.schema,
        # Ids are never used again, even after the newest row has gone.
        **options.of_table(autoincrement=True),
    )
    c = table.c
    where = options.where
    ready = (
        (c.claimable, c.queue, c.priority, c.next_attempt_at, c.id)
        if mysql
        else (c.queue, c.priority.desc(), c.next_attempt_at, c.id)
    )
    Index(f"{name}_ready", *ready, **where(f"state IN ({_states(CLAIMABLE_STATES)})"))
    Index(f"{name}_leased", c.queue, c.lease_expires_at, **where("state = 'PROCESSING'"))
    keyed = where(f"{'`key`' if mysql else 'key'} IS NOT NULL")
    Index(f"{name}_key", c.queue, c.key, c.id, **keyed)
    partial = where("policy_key IS NOT NULL")
    Index(f"{name}_policy_key", c.queue, c.policy_key, c.id, **partial)
    # Few messages have one: an entry for each of the others would cost a quarter of every claim.
    Index(f"{name}_dedup", c.queue, c.dedup_id, unique=True, **where("dedup_id IS NOT NULL"))
    return table


def _archive(
    config: SqlBrokerSchemaConfig,
    name: str,
    metadata: MetaData,
    options: "_Options",
    dialect_name: str | None,
) -> Table:
    parts = config.archive_partitions is not None and dialect_name in (None, "postgresql")
    table = Table(
        name,
        metadata,
        Column("id", IdType, primary_key=True, autoincrement=False),
        *_shared(ARCHIVED_STATES, name),
        # A unique index of a partitioned table must hold what it is partitioned by.
        Column(
            "archived_at",
            UtcTimestamp,
            nullable=False,
            server_default=clock(),
            primary_key=parts,
        ),
        Column("reason", NameType(255)),
        # The message that its reason is about, such as the one that it was superseded by.
        Column("related_id", IdType),
        # What its last error has in common with others (`core.settle.error_fingerprint`).
        Column("error_fingerprint", NameType(16)),
        schema=config.schema,
        **options.of_table(partition_by="RANGE (archived_at)" if parts else None),
    )
    Index(f"{name}_archived", table.c.archived_at, table.c.id)
    Index(f"{name}_queue", table.c.queue, table.c.archived_at)
    # Few rows where there are partial indexes: most messages are COMPLETED.
    partial = options.where(f"state <> '{MessageState.COMPLETED.name}'")
    c = table.c
    Index(f"{name}_uncompleted", c.state, c.archived_at, c.id, **partial)
    return table


def _policy_state(config: SqlBrokerSchemaConfig, metadata: MetaData, options: "_Options") -> Table:
    """One row for what a policy knows of (scope, key): `scope` names the policy and its queue."""
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
        # Of a lock: how often it was taken, which nothing takes back.
        Column("counter", BigInteger, nullable=False, server_default=text("0")),
        # When a policy has something to do for the key.
        Column("due_at", UtcTimestamp),
        schema=config.schema,
        **options.of_table(),
    )
    # After expires_at any process may remove the row.
    Index(f"{name}_expiry", table.c.expires_at, **options.where("expires_at IS NOT NULL"))
    partial = options.where("due_at IS NOT NULL")
    Index(f"{name}_due", table.c.scope, table.c.due_at, **partial)
    return table


class _Options:
    """The options that some databases have of their own, for `names` of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def where(self, condition: str) -> dict[str, Any]:
        """A partial index; MySQL and MariaDB have no such thing."""
        with_it = [name for name in self._names if name not in MYSQL]
        return {f"{name}_where": text(condition) for name in with_it}

    def of_table(
        self, *, autoincrement: bool = False, partition_by: str | None = None
    ) -> dict[str, Any]:
        """How a table is stored."""
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
