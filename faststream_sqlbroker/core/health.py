"""What `broker.admin.health` and `broker.admin.diagnosis` find, and what of it is a problem.

Lengths of time are seconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.access import Activities


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisPart:
    """One thing that the broker depends on."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values; none of them is a secret."""
    problems: tuple[str, ...] = ()
    """What is wrong, one line each with what to do."""
    error: str | None = None
    """Why it could not be looked at; None: it was."""
    took: float = 0.0
    """Seconds."""

    @property
    def ok(self) -> bool:
        """Whether it was looked at, and nothing is wrong."""
        return self.error is None and not self.problems


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All things that the broker depends on, each by itself."""

    parts: tuple[DiagnosisPart, ...]

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return all(part.ok for part in self.parts)

    @property
    def as_json(self) -> dict[str, Any]:
        """As JSON values: `ok`, and `parts` by name."""
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
class Surroundings:
    """What a process knows of itself without the database."""

    listening: bool | None = None
    """Whether it hears wake-ups of other processes now; None: it has no reason to, or the database
    has none.
    """
    relays: Mapping[str, bool] = field(default_factory=dict)
    """The publishers of other brokers that answers go to, and whether each can publish."""
    is_running: bool = False


OLD_TRANSACTION = 300.0
"""A transaction that has been open for longer is a problem: no row that was deleted since its begin
can be removed, and each claim reads past those rows."""
CLOCK_DOUBT = 5.0
"""Two clocks that differ by more are a problem: times in the log then do not fit those of rows."""
DEAD_SHARE = 5
"""More than so many times as many dead rows as live ones are a problem, beyond `DEAD_AT_LEAST`."""
DEAD_AT_LEAST = 10_000
"""Fewer dead rows than this are none: a vacuum soon removes them."""
DEAD_OF_INSERTED = 5
"""A message leaves two dead rows, and one more for each retry. More than so many for each message
since the last vacuum were there before it: it could not remove them."""
VACUUM_LATE = 300.0
"""Autovacuum looks each minute. What a table leaves behind in five is a problem by itself."""
PURGE_BACKLOG = 1_000_000
"""Undo records that InnoDB has not purged; more are a problem."""
SLOT = "replication slot"
"""The kind of a slot whose standby is away: it keeps rows for as long as it exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberHealth:
    """A subscriber of this process."""

    queues: tuple[str, ...]
    worker: str
    """Its name, as `broker.admin.subscribers` lists it."""
    healthy: bool
    """Whether the last turn of each of its loops worked."""
    last_claim_ago: float | None
    """Since the last claim, or look for messages, that worked; None: there was none."""
    last_flush_ago: float | None
    """Since its writer of outcomes last worked, or found nothing to write; None: it never did."""
    held: int
    """Messages that it has leased: they wait for a worker, run, or wait to be written."""


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """This process: what it does, and its subscribers that run."""

    activities: Activities = frozenset()
    subscribers: tuple[SubscriberHealth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction, or something like it, that keeps dead rows from being removed."""

    kind: str
    """"session", "prepared transaction", "standby" (one that tells what its readers still see) or
    "replication slot" (of a standby that is away)."""
    name: str
    """The session's process or connection id; the name of a prepared transaction or slot."""
    user: str | None
    application: str | None
    """The session's application_name (PostgreSQL), or the client's host."""
    state: str | None
    age: float | None
    """Since its begin; None: not known."""
    query: str | None
    """The beginning of its current or last statement; None: there is none, or it is hidden."""

    def __str__(self) -> str:
        """One line."""
        who = "".join(f", {each}" for each in (self.application, self.user, self.state) if each)
        since = "" if self.age is None else f", open for {self.age:.0f} s"
        query = f": {' '.join(self.query.split())}" if self.query else ""
        return f"{self.kind} {self.name}{who}{since}{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHealth:
    """Dead rows of one table, as PostgreSQL's statistics estimate them."""

    table: str
    live_rows: int
    dead_rows: int
    inserted_rows: int
    """Since the last vacuum."""
    last_vacuum_ago: float | None
    """Since the last vacuum; None: there was none."""
    options: tuple[str, ...]
    """The table's own storage parameters, such as autovacuum's."""

    @property
    def is_vacuumed(self) -> bool:
        """Whether the table leaves autovacuum on."""
        return "autovacuum_enabled=false" not in self.options

    @property
    def is_bloated(self) -> bool:
        """Whether there are many more dead rows than live ones, and vacuums are late or in vain."""
        if self.dead_rows <= max(DEAD_AT_LEAST, DEAD_SHARE * self.live_rows):
            return False
        late = self.last_vacuum_ago is None or self.last_vacuum_ago > VACUUM_LATE
        return late or self.dead_rows > DEAD_OF_INSERTED * self.inserted_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseHealth:
    """What the server tells."""

    version: str
    transactions: tuple[OpenTransaction, ...] = ()
    """Those of other sessions, the oldest first; at most 20."""
    hidden: str | None = None
    """Why transactions may be missing from that list, and the right that shows them."""
    tables: tuple[TableHealth, ...] = ()
    """PostgreSQL only."""
    autovacuum: bool | None = None
    """The server's setting (PostgreSQL)."""
    purge_backlog: int | None = None
    """Undo records that wait to be purged (MySQL, MariaDB); None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of the database and of this process; `problems` says what is wrong."""

    database: DatabaseHealth
    clock_difference: float
    """The database's clock minus this machine's; positive if the database is ahead."""
    clock_doubt: float
    """By how much `clock_difference` may be wrong: half of the time that the answer took."""
    pool_used: int | None
    """Connections in use of this process's pool; None: the pool does not count."""
    pool_limit: int | None
    """Most connections of the pool; None: it has no limit."""
    process: ProcessHealth
    writes: str | None = None
    """Why the database takes no writes; None: it takes them."""
    lacks: tuple[str, ...]
    """Rights and tables that this process needs and does not have, each with its cure."""
    schema: tuple[str, ...]
    """How the tables differ from those that this version needs, each with its cure."""
    differing_windows: tuple[str, ...] = ()
    """Windows of lakes, 20 at most, that are not pruned, as the archive has other rows in them than
    exports have recorded; none if this user may not read the records."""
    drained: tuple[str, ...] = ()
    """Live subscribers of all processes, 20 at most, that an operator has drained. That is no
    problem by itself: `queues` tells of a queue without one that claims."""
    old_transaction: float = field(default=OLD_TRANSACTION)
    """The age from which a transaction is a problem."""

    @property
    def problems(self) -> list[str]:
        """What is wrong, one line each; none if all is well."""
        return [f"{what}: {text}" for what, texts in self.findings().items() for text in texts]

    def findings(self) -> dict[str, list[str]]:
        """All that was looked at, each with what is wrong with it."""
        return {
            "writes": [] if self.writes is None else [self.writes],
            "tables": list(self.schema),
            "rights": list(self.lacks),
            "clock": list(clock_problems(self.clock_difference, self.clock_doubt)),
            "pool": list(pool_problems(self.pool_used, self.pool_limit)),
            "subscribers": list(subscriber_problems(self.process.subscribers)),
            "transactions": list(
                transaction_problems(self.database.transactions, self.old_transaction)
            ),
            "dead rows": list(dead_row_problems(self.database)),
            "lakes": [
                f"{each}: the archive has other rows than an export has recorded, so nothing of "
                "it is removed: export again"
                for each in self.differing_windows
            ],
        }


def clock_problems(difference: float, doubt: float) -> Iterator[str]:
    """Say what is wrong with clocks that differ so much."""
    if abs(difference) > CLOCK_DOUBT + doubt:
        yield (
            f"the database's clock and this machine's differ by {difference:.1f} s. Messages go by "
            "the database's clock, but times in logs do not fit: let both follow NTP"
        )


def pool_problems(used: int | None, limit: int | None) -> Iterator[str]:
    """Say what is wrong with a pool of which so many connections are in use."""
    if limit is not None and (used or 0) >= limit:
        yield (
            f"all {limit} connections of this process's pool are in use: give create_async_engine "
            "a larger pool_size, or the subscribers fewer workers"
        )


def subscriber_problems(subscribers: Iterable[SubscriberHealth]) -> Iterator[str]:
    """Say what is wrong with subscribers of this process."""
    for each in subscribers:
        if not each.healthy:
            claim = _ago("claim", each.last_claim_ago)
            flush = _ago("flush", each.last_flush_ago)
            yield f"{each.worker} of {', '.join(each.queues)} fails: {claim}, {flush}"


def transaction_problems(
    transactions: Iterable[OpenTransaction], old: float = OLD_TRANSACTION
) -> Iterator[str]:
    """Say what is wrong with open transactions: those of the age `old` are a problem."""
    for each in transactions:
        # A standby that is there has no age: what its readers see may be quite new.
        if each.kind == SLOT or (each.age or 0.0) >= old:
            yield f"{each} keeps dead rows from being removed: end it"


def dead_row_problems(found: DatabaseHealth) -> Iterator[str]:
    """Say what is wrong with dead rows."""
    if found.autovacuum is False:
        yield "autovacuum is off in the server: dead rows slow every claim down; turn it on"
    for table in found.tables:
        if not table.is_vacuumed:
            yield (
                f"{table.table} has autovacuum_enabled=false: ALTER TABLE {table.table} RESET "
                "(autovacuum_enabled)"
            )
        if table.is_bloated:
            yield (
                f"{table.table} has {table.dead_rows} dead rows and {table.live_rows} live ones, "
                f"{_ago('vacuum', table.last_vacuum_ago)}: end old transactions, then VACUUM it"
            )
    if found.purge_backlog is not None and found.purge_backlog > PURGE_BACKLOG:
        yield (
            f"InnoDB has not purged {found.purge_backlog} undo records: end old transactions, and "
            "it will"
        )


def _ago(what: str, seconds: float | None) -> str:
    return f"no {what} yet" if seconds is None else f"last {what} {seconds:.0f} s ago"


def oldest_first(found: Sequence[OpenTransaction]) -> tuple[OpenTransaction, ...]:
    """`found` by age; what has no age is at the beginning."""
    return tuple(sorted(found, key=lambda each: (each.age is not None, -(each.age or 0.0))))
