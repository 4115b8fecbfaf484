"""What every database must be able to do, and the parts of it they share.

A dialect holds all SQL of one database. Its methods are synchronous and take a SQLAlchemy `Connection`, so
that the same code serves asyncio (through `AsyncConnection.run_sync`) and synchronous callers. None of
them begins or commits; `store` does.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    NewMessage,
    ReadyPair,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.schema.tables import Tables

T = TypeVar("T")

MESSAGE_COLUMNS = (
    "id, queue, priority, {key}, dedup_id, headers, payload, state, attempts_count, deliveries_count, "
    "publish_count, origin_id, created_at, next_attempt_at, expires_at, first_attempt_at, last_attempt_at, "
    "acquired_at, last_error"
)
CLAIMED_COLUMNS = (
    "id", "queue", "payload", "headers", "priority", "key", "attempts_count", "deliveries_count",
    "publish_count", "created_at", "next_attempt_at", "expires_at", "first_attempt_at", "last_attempt_at",
    "acquired_at",
)  # fmt: skip


class Dialect(ABC):
    """All SQL of one database over the tables of one broker."""

    name: str
    """SQLAlchemy's name of the database."""
    isolation_level: str | None = None
    """Isolation level of the broker's own transactions; None leaves the engine's."""
    can_listen = False
    """Whether a wake-up can arrive from another process."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`, quoted for `sqlalchemy_dialect`."""
        preparer = sqlalchemy_dialect.identifier_preparer
        self.tables = tables
        self.names = {
            "message": preparer.format_table(tables.message),
            "archive": preparer.format_table(tables.archive) if tables.archive is not None else "",
            "key": preparer.quote("key"),
            "ready_index": preparer.quote(f"{tables.message.name}_ready"),
            "leased_index": preparer.quote(f"{tables.message.name}_leased"),
        }
        self.sql: dict[str, TextClause] = {}

    def _statement(self, name: str, sql: str, *binds: Any, **extra: str) -> TextClause:
        """Fill the table names into `sql`, declare its binds and keep it under `name`."""
        clause = text(sql.format(**self.names, **extra).strip())
        self.sql[name] = clause.bindparams(*binds) if binds else clause
        return self.sql[name]

    @property
    def has_archive(self) -> bool:
        """Whether finished messages can be kept."""
        return self.tables.archive is not None

    def begin(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Prepare the transaction that `connection` has just begun for the broker's writes."""

    def setup(self, connection: Connection) -> None:  # noqa: B027 - most databases need nothing here
        """Check (and set, where it is the database's own) what the broker relies on; once per start."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether repeating the transaction may succeed: deadlock, serialization, busy, full disk."""

    @abstractmethod
    def now(self, connection: Connection) -> datetime:
        """The database's clock (aware, UTC)."""

    @abstractmethod
    def insert(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; their ids in the order given, None where dedup_id exists already."""

    @abstractmethod
    def ready_pairs(self, connection: Connection, queues: Sequence[str]) -> list[ReadyPair]:
        """The (queue, priority) pairs with claimable rows, queues in the order given, priority falling."""

    @abstractmethod
    def claim(
        self, connection: Connection, pairs: Sequence[ReadyPair], limit: int, lease: float, token: UUID
    ) -> list[ClaimedMessage]:
        """Lease up to `limit` due rows; ordered by pair, due time, id. Locked rows are skipped."""

    @abstractmethod
    def renew(self, connection: Connection, leases: Sequence[tuple[int, UUID]], lease: float) -> set[int]:
        """Lengthen `leases` to `lease` seconds from now; the ids that are still held."""

    @abstractmethod
    def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        """Write `settlements`, each only if its lease is still held."""

    @abstractmethod
    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """Give back up to `limit` rows whose lease has expired; how many."""

    @abstractmethod
    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Give back, uncharged, what a claim with `token` has leased in `queues`; how many rows."""

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Make `ClaimedMessage`s of rows selected as `CLAIMED_COLUMNS`."""
        at = self.time
        return [
            ClaimedMessage(
                r[0], r[1], bytes(r[2]), load_headers(r[3]), r[4], r[5], r[6], r[7], r[8],
                at(r[9]), at(r[10]), r[11] and at(r[11]), r[12] and at(r[12]), r[13] and at(r[13]),
                at(r[14]), token,
            )
            for r in rows
        ]  # fmt: skip

    def time(self, value: Any) -> Any:
        """A selected time as an aware datetime (UTC)."""
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


def load_headers(value: Any) -> dict[str, Any]:
    """Headers as selected (JSON text, a decoded object or NULL); anything but an object is kept under "value".

    A foreign producer may store any JSON; it must not keep the message from being handled.
    """
    if value is None:
        return {}
    loaded = json.loads(value) if isinstance(value, str | bytes | bytearray) else value
    return loaded if isinstance(loaded, dict) else {"value": loaded}


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Slices of `items` of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
