"""Results of `broker.admin.health` and `broker.admin.diagnosis`, and the problems in the results.

Durations are seconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.access import Activities


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisPart:
    """The state of a single dependency of the broker."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values without secrets."""
    problems: tuple[str, ...] = ()
    """Problems, one line each, with their remedies."""
    error: str | None = None
    """Reason why the check failed; None if it succeeded."""
    took: float = 0.0
    """Duration of the check in seconds."""

    @property
    def ok(self) -> bool:
        """True if the check succeeded and found no problem."""
        return self.error is None and not self.problems


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of everything that the broker depends on, part by part."""

    parts: tuple[DiagnosisPart, ...]

    @property
    def ok(self) -> bool:
        """True if all parts are ok."""
        return all(part.ok for part in self.parts)

    @property
    def as_json(self) -> dict[str, Any]:
        """The result as JSON values: `ok`, and `parts` by name."""
        return {
            "ok": self.ok,
            "parts": {
                part.name: {
                    "ok": part.ok,
                    "facts": dict(part.facts),
                    "problems": list(part.problems),
                    "error": part.error,
                    "took": round(part.took, 3),
                }
                for part in self.parts
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process's information about itself that needs no database."""

    listening: bool | None = None
    """True if the process currently receives wake-ups of other processes; None if it has no reason
    to, or if the database has none."""
    relays: Mapping[str, bool] = field(default_factory=dict)
    """Publishers of other brokers that receive responses; True for those that can publish."""
    is_running: bool = False


OLD_TRANSACTION = 300.0
"""Age from which an open transaction is a problem: no row that was deleted since its start can be
removed, and each claim reads past those rows."""
MAX_CLOCK_DIFFERENCE = 5.0
"""Difference between two clocks from which it is a problem: times in the log then do not match
those of rows."""
DEAD_SHARE = 5
"""More dead rows than live ones times this factor are a problem, above `MIN_DEAD_ROWS`."""
MIN_DEAD_ROWS = 10_000
"""Fewer dead rows than this are no problem: a vacuum soon removes them."""
DEAD_OF_INSERTED = 5
"""A message leaves two dead rows, and one more for each retry. If there are more than this per
message since the last vacuum, that vacuum could not remove the older ones."""
VACUUM_LATE = 300.0
"""Autovacuum runs every minute. Dead rows that remain for five minutes are a problem by
themselves."""
PURGE_BACKLOG = 1_000_000
"""Number of unpurged undo records of InnoDB above which they are a problem."""
REPLICATION_SLOT = "replication slot"
"""Kind of a slot whose standby is away: it keeps rows for as long as it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberHealth:
    """The state of a subscriber of this process."""

    queues: tuple[str, ...]
    worker: str
    """Name of the subscriber in `broker.admin.subscribers`."""
    healthy: bool
    """True if the last turn of each of its loops succeeded."""
    last_claim_ago: float | None
    """Seconds since the last successful claim or poll; None if there was none."""
    last_flush_ago: float | None
    """Seconds since its writer of outcomes last succeeded, or had nothing to write; None if it
    never did."""
    held: int
    """Number of leased messages: waiting for a worker, running, or waiting to be written."""


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """The activities and running subscribers of this process."""

    activities: Activities = frozenset()
    subscribers: tuple[SubscriberHealth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction, or something similar, that keeps dead rows from being removed."""

    kind: str
    """"session", "prepared transaction", "standby" (one that reports the rows visible to its
    readers) or "replication slot" (of a standby that is away)."""
    name: str
    """The session's process or connection id; or the name of a prepared transaction or slot."""
    user: str | None
    application: str | None
    """The session's application_name (PostgreSQL), or the client's host."""
    state: str | None
    age: float | None
    """Seconds since its start; None if unknown."""
    query: str | None
    """The beginning of its current or last statement; None if there is none, or if it is hidden."""

    def __str__(self) -> str:
        """Return a single line for people."""
        details = "".join(
            f", {detail}" for detail in (self.application, self.user, self.state) if detail
        )
        since = "" if self.age is None else f", open for {self.age:.0f} s"
        query = f": {' '.join(self.query.split())}" if self.query else ""
        return f"{self.kind} {self.name}{details}{since}{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHealth:
    """Dead rows of a table, as estimated by PostgreSQL's statistics."""

    table: str
    live_rows: int
    dead_rows: int
    inserted_rows: int
    """Rows inserted since the last vacuum."""
    last_vacuum_ago: float | None
    """Seconds since the last vacuum; None if there was none."""
    options: tuple[str, ...]
    """The table's own storage parameters, such as those of autovacuum."""

    @property
    def is_vacuumed(self) -> bool:
        """True if autovacuum is on for the table."""
        return "autovacuum_enabled=false" not in self.options

    @property
    def is_bloated(self) -> bool:
        """True if there are many more dead rows than live rows, and vacuums do not help.

        Dead rows of messages inserted since a recent vacuum are normal. More than those mean that
        the vacuum could not remove the older ones.
        """
        if self.dead_rows <= max(MIN_DEAD_ROWS, DEAD_SHARE * self.live_rows):
            return False
        is_overdue = self.last_vacuum_ago is None or self.last_vacuum_ago > VACUUM_LATE
        return is_overdue or self.dead_rows > DEAD_OF_INSERTED * self.inserted_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseHealth:
    """The state of the database server."""

    version: str
    transactions: tuple[OpenTransaction, ...] = ()
    """Transactions of other sessions, the oldest first; at most 20."""
    hidden: str | None = None
    """Reason why transactions may be missing from that list, and the right that shows them."""
    tables: tuple[TableHealth, ...] = ()
    """Tables (PostgreSQL only)."""
    autovacuum: bool | None = None
    """The server's setting (PostgreSQL)."""
    purge_backlog: int | None = None
    """Undo records waiting for a purge (MySQL, MariaDB); None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of the database and of this process; `problems` lists the problems."""

    database: DatabaseHealth
    clock_difference: float
    """The database's clock minus this machine's; positive if the database is ahead."""
    clock_doubt: float
    """Maximum error of `clock_difference`: half of the time that the answer took."""
    pool_used: int | None
    """Connections in use of this process's pool; None if the pool does not count."""
    pool_limit: int | None
    """Maximum number of connections of the pool; None if it has no limit."""
    process: ProcessHealth
    writes: str | None = None
    """Reason why the database accepts no writes; None if it accepts them."""
    lacks: tuple[str, ...]
    """Rights and tables that this process needs and lacks, each with the remedy."""
    schema: tuple[str, ...]
    """Differences between the tables and those that this version needs, each with the remedy."""
    differing_windows: tuple[str, ...] = ()
    """Windows of lakes, 20 at most, that are not pruned because the archive has other rows in them
    than exports have recorded; empty if this user may not read the records."""
    drained: tuple[str, ...] = ()
    """Live subscribers of all processes, 20 at most, that an operator has drained. That is no
    problem by itself: `queues` reports queues without a claiming subscriber."""
    old_transaction: float = field(default=OLD_TRANSACTION)
    """Age from which a transaction is a problem."""

    @property
    def problems(self) -> list[str]:
        """The problems, a line for each; empty if all is well."""
        return [
            f"{subject}: {text}" for subject, texts in self.findings().items() for text in texts
        ]

    def findings(self) -> dict[str, list[str]]:
        """Return all subjects of the check, each with a list of problems.

        A subject without a problem has an empty list.
        """
        return {
            "writes": [] if self.writes is None else [self.writes],
            "tables": list(self.schema),
            "rights": list(self.lacks),
            "clock": list(find_clock_problems(self.clock_difference, self.clock_doubt)),
            "pool": list(find_pool_problems(self.pool_used, self.pool_limit)),
            "subscribers": list(find_subscriber_problems(self.process.subscribers)),
            "transactions": list(
                find_transaction_problems(self.database.transactions, self.old_transaction)
            ),
            "dead rows": list(find_dead_row_problems(self.database)),
            "lakes": [
                f"{window}: the archive's rows differ from those that an export recorded, so "
                "retention keeps them: export again"
                for window in self.differing_windows
            ],
        }


def find_clock_problems(difference: float, tolerance: float) -> Iterator[str]:
    """Yield a problem if the clocks differ too much.

    `difference` is in seconds; `tolerance` is its maximum error, half of the time that the
    database took to answer.
    """
    if abs(difference) > MAX_CLOCK_DIFFERENCE + tolerance:
        yield (
            f"the clocks of the database and this machine differ by {difference:.1f} s. Messages "
            "use the database's clock, so times in logs do not match: synchronize both with NTP"
        )


def find_pool_problems(used: int | None, limit: int | None) -> Iterator[str]:
    """Yield a problem if all connections of the pool are in use."""
    if limit is not None and (used or 0) >= limit:
        yield (
            f"all {limit} connections of this process's pool are in use: raise pool_size of "
            "create_async_engine, or lower max_workers of the subscribers"
        )


def find_subscriber_problems(subscribers: Iterable[SubscriberHealth]) -> Iterator[str]:
    """Yield a problem for each subscriber of this process that fails.

    It fails if one of its loops does; a flush is a write of outcomes.
    """
    for subscriber in subscribers:
        if not subscriber.healthy:
            claim = _format_ago("claim", subscriber.last_claim_ago)
            flush = _format_ago("flush", subscriber.last_flush_ago)
            yield f"{subscriber.worker} of {', '.join(subscriber.queues)} fails: {claim}, {flush}"


def find_transaction_problems(
    transactions: Iterable[OpenTransaction], max_age: float = OLD_TRANSACTION
) -> Iterator[str]:
    """Yield a problem for each transaction of the age `max_age` or more.

    While it is open, no dead row can be removed: an old version of a row, which it might still
    read.
    """
    for transaction in transactions:
        # A connected standby has no age: its readers may see recent rows only.
        if transaction.kind == REPLICATION_SLOT or (transaction.age or 0.0) >= max_age:
            remedy = "drop it" if transaction.kind == REPLICATION_SLOT else "end it"
            yield f"{transaction} prevents the removal of dead rows: {remedy}"


def find_dead_row_problems(database: DatabaseHealth) -> Iterator[str]:
    """Yield the problems with dead rows.

    A dead row is an old version of a changed or deleted row, which a vacuum removes. Until then
    every claim has to read past it.
    """
    if database.autovacuum is False:
        yield "autovacuum is off on the server, so dead rows slow down every claim: turn it on"
    for table in database.tables:
        if not table.is_vacuumed:
            yield (
                f"{table.table} has autovacuum_enabled=false: ALTER TABLE {table.table} RESET "
                "(autovacuum_enabled)"
            )
        if table.is_bloated:
            yield (
                f"{table.table} has {table.dead_rows} dead rows and {table.live_rows} live rows, "
                f"{_format_ago('vacuum', table.last_vacuum_ago)}: end old transactions, then "
                "run VACUUM"
            )
    if database.purge_backlog is not None and database.purge_backlog > PURGE_BACKLOG:
        yield (
            f"InnoDB has {database.purge_backlog} unpurged undo records: end old transactions to "
            "let it purge them"
        )


def _format_ago(label: str, seconds: float | None) -> str:
    return f"no {label} yet" if seconds is None else f"last {label} {seconds:.0f} s ago"


def sort_by_age(transactions: Sequence[OpenTransaction]) -> tuple[OpenTransaction, ...]:
    """Sort transactions by age, the oldest first.

    Transactions without an age come before: an unknown age may be the greatest.
    """
    return tuple(
        sorted(
            transactions,
            key=lambda transaction: (transaction.age is not None, -(transaction.age or 0.0)),
        )
    )
