"""A message as it is inserted, as it is claimed, and as it is settled."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.outcome import Outcome
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.core.text import load_headers

_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)

Leases = Sequence[tuple[int, UUID]]
"""Messages by id, each with the token of its lease."""


@dataclass(slots=True)
class NewMessage:
    """One row to insert. `headers` is JSON text; times are aware datetimes or seconds from now."""

    queue: str
    payload: bytes
    headers: str | None = None
    priority: int = 0
    key: str | None = None
    dedup_id: str | None = None
    delay: float | None = None
    next_attempt_at: datetime | None = None
    expires_in: float | None = None


Moment = datetime | bytes
"""A time as it was selected: aware, without a zone (UTC), or PostgreSQL's bytes; `moment` decodes
it for who looks."""


def moment(value: Moment) -> datetime:
    """An aware datetime (UTC); bytes are microseconds since 2000, big-endian (PostgreSQL's
    timestamptz_send).
    """
    if isinstance(value, bytes):
        return _EPOCH + timedelta(microseconds=int.from_bytes(value, signed=True))
    return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


@dataclass(slots=True)
class ClaimedMessage:
    """A row leased to this process; FastStream's raw message. Times are aware (UTC) datetimes.

    `outcome` is what the delivery ended in: the first one recorded wins. `claimed_monotonic` is
    this process's monotonic clock at the claim (seconds); it only measures lengths of time.
    """

    id: int
    queue: str
    payload: bytes
    stored_headers: Any
    """As selected: a mapping, JSON, or what a foreign producer has stored."""
    priority: int
    key: str | None
    attempts_count: int
    deliveries_count: int
    publish_count: int
    created: Moment
    due: Moment
    expires_at: datetime | None
    first_attempt_at: datetime | None
    last_attempt_at: datetime | None
    acquired: Moment
    lease_token: UUID
    hops: int = 0
    """How often the broker itself has moved it on since a handler last did."""
    claimed_monotonic: float = 0.0
    renewed_monotonic: float = 0.0
    outcome: Outcome | None = None
    lease_lost: bool = False
    chained: Sequence[NewMessage] = ()
    """What its handler has published with its ack."""
    no_chain: str = ""
    """Why nothing (more) can be published with its ack."""
    holder: "Holder | None" = field(default=None, repr=False, compare=False)
    """Who claimed it."""
    held_until: float = 0.0
    """Until when its handler has asked to hold it (this process's monotonic seconds)."""
    slot: tuple[float, float] | None = None
    """From when and until when its handler may start, in seconds from the claim; None: at any time.
    """
    prefetched: bool = False
    """Whether its lease is the shorter one, of a row that waits for a worker."""

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name, decoded each time: nearly always once, and then they go with the
        message.
        """
        return load_headers(self.stored_headers)

    @property
    def created_at(self) -> datetime:
        """When it was published."""
        return moment(self.created)

    @property
    def next_attempt_at(self) -> datetime:
        """When it was due."""
        return moment(self.due)

    @property
    def acquired_at(self) -> datetime:
        """When it was claimed."""
        return moment(self.acquired)

    def settle_as(self, outcome: Outcome) -> bool:
        """Record `outcome` unless there is one already; return whether it was recorded."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


class Claimed(list[ClaimedMessage]):
    """What a claim has leased, and the suspects that it has met and left where they are, by id."""

    def __init__(
        self, rows: Iterable[ClaimedMessage] = (), suspects: Mapping[int, Suspect] | None = None
    ) -> None:
        """`suspects` were not leased."""
        super().__init__(rows)
        self.suspects: dict[int, Suspect] = dict(suspects or {})

    @classmethod
    def without_suspects(
        cls, found: Iterable[ClaimedMessage], suspicion: Suspicion | None
    ) -> "Claimed":
        """Rows that were found and not yet charged; suspects among them are told of, if `suspicion`
        says so.
        """
        if suspicion is None:
            return cls(found)
        rows = cls()
        of = suspicion.of
        for row in found:
            if (suspect := of(row.deliveries_count, row.attempts_count)) is None:
                rows.append(row)
            elif suspicion.told:
                rows.suspects[row.id] = suspect
        return rows


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Which rows of a claim wait for a worker, and for how long they are leased."""

    after: int
    """The first rows, as many as this, start at once."""
    lease: float
    """Seconds for which the others are leased."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What the handler of a claimed row may ask of whoever claimed it."""

    extend: Callable[[Sequence[ClaimedMessage], float], Awaitable[bool]]
    """Hold the rows for this many seconds from now; whether all are still held."""
    encode: Callable[[Any], Awaitable[tuple[bytes, str | None]]] | None
    """A body as `publish` encodes it, and its content type."""
    ack_first: bool
    """Whether the rows are gone before the handler starts."""
    log: Callable[..., None] = lambda *_args, **_kwargs: None
    """The subscriber's."""
    warned: set[str] = field(default_factory=set)
    """What the log was told once, and is not to be told again."""


@dataclass(slots=True, eq=False)
class Unit:
    """What is written in one transaction or not at all: settlements of one delivery, and what is
    chained to them.

    Its settlements name it, and stand side by side wherever they are; so nothing points in a
    circle.
    """

    chained: Sequence[NewMessage] = ()
    """Messages to insert when the settlements are written."""
    fallback: "Callable[[BaseException | None], list[Settlement]] | None" = None
    """What to write of the same rows if the database refuses to store `chained`, with its error as
    far as it is known."""


@dataclass(slots=True)
class Settlement:
    """What the database is told about one finished delivery, fenced by (id, lease_token).

    `state` COMPLETED, FAILED or DISCARDED takes the row out of the message table (into the archive
    if `archive`); PENDING or RETRYABLE leaves it there; None means as before the claim.
    """

    id: int
    lease_token: UUID
    state: MessageState | None
    archive: bool = True
    attempted: bool = True
    """Whether attempts_count goes up by one and first/last_attempt_at are written."""
    ran: bool = False
    """Whether first/last_attempt_at are written all the same: a handler has ended, and no attempt
    is charged."""
    uncharge: bool = False
    """Whether deliveries_count goes down by one."""
    ended_after: float = 0.0
    """Seconds from the claim to the handler's end; the database adds them to acquired_at."""
    delay: float | None = None
    """Seconds from the database's now to the next attempt; None keeps the due time."""
    reason: str | None = None
    """One of `core.states`, or what a handler gave."""
    related_id: int | None = None
    """The message that the reason is about."""
    error: str | None = None
    queue: str | None = None
    """The queue to move to (attempts and deliveries are reset, dedup_id dropped)."""
    payload: bytes | None = None
    """The body to move with; None keeps it."""
    headers: str | None = None
    """The headers to move with, as JSON text; None keeps them."""
    published_again: bool = False
    """Whether publish_count goes up by one."""
    hop: int | None = None
    """1: one more hop by the broker itself; 0: they begin anew; None: as before."""
    unit: Unit | None = None
    """What it is written together with; None: it is written by itself."""

    @property
    def ended(self) -> float | None:
        """`ended_after` if a handler has ended, else None."""
        return self.ended_after if self.attempted or self.ran else None

    @property
    def plain_ack(self) -> bool:
        """Whether a handler has acked it and there is nothing else to say."""
        return (
            self.state is MessageState.COMPLETED
            and self.attempted
            and not self.uncharge
            and self.reason is None
            and self.error is None
        )

    @property
    def leaves(self) -> bool:
        """Whether the row leaves the message table."""
        state = self.state  # `in` a set would hash an enum, which is Python code
        return (
            state is MessageState.COMPLETED
            or state is MessageState.FAILED
            or state is MessageState.DISCARDED
        )


class Acked(Settlement):
    """A handler has acked it and there is nothing else to say, as for nearly all messages.

    What is the same for all of them is the class's, so that only four fields are written for each.
    """

    __slots__ = ()

    state = MessageState.COMPLETED
    attempted = True
    ran = False
    uncharge = False
    published_again = False
    delay = reason = related_id = hop = error = queue = payload = headers = unit = None
    plain_ack = leaves = True

    def __init__(self, id: int, lease_token: UUID, ended_after: float, archive: bool) -> None:  # noqa: A002
        """`ended_after` in seconds; `archive` tells whether it is kept."""
        self.id = id
        self.lease_token = lease_token
        self.ended_after = ended_after
        self.archive = archive


@dataclass(slots=True)
class ReadyPair:
    """One (queue, priority) with claimable rows; `due_in` is seconds until its first is due (≤ 0:
    now).
    """

    queue: str
    priority: int
    due_in: float
    due: datetime | None = None
    """When its first is due, where the database says so (PostgreSQL)."""
    since: datetime | None = None
    """Rows that were due before are left alone by a claim (PostgreSQL); None claims all."""
    unusable: bool = False
    """Whether some of its rows have a due time that is none (SQLite), which no claim would find."""


class ReadyPairs(list[ReadyPair]):
    """Pairs as they were found `at` the database's time; `took` is how many seconds its server was
    busy (PostgreSQL).
    """

    took = 0.0
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A message of which nobody knows whether its handler has run, or how far it came.

    `AckPolicy.ACK_FIRST` removes a message before its handler starts; this one's process has not
    been heard of since, or the answer to the removal's COMMIT was lost.
    """

    message_id: int
    queue: str
    key: str | None
    started_at: datetime
    """When the message was removed (the database's clock, aware, UTC)."""
    worker: str
    """Host and process id of the worker."""


@dataclass(slots=True)
class SettleResult:
    """Ids whose settlement was written, in no order, and those whose lease was gone.

    In neither set is what stays to be written: its row is locked by somebody else, or a row of its
    unit is locked or lost.
    """

    settled: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
