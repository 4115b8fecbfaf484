"""A message as it is inserted, as it is claimed, and as it is settled."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.orders import Orders
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
    lookup: str | None = None
    """By which it is mirrored; None: it is not."""
    info: str | None = None


Moment = datetime | bytes
"""A time as it was selected: aware, naive (UTC), or PostgreSQL's bytes. `moment` decodes it on
first use, which most messages never need."""


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
    """As selected: a mapping, JSON text, or what another program has stored."""
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
    """Moves by `forward_to` since a handler last ran."""
    claimed_monotonic: float = 0.0
    renewed_monotonic: float = 0.0
    locked_monotonic: float = 0.0
    """When a renewal last found it locked by another transaction, whose lock keeps the lease."""
    outcome: Outcome | None = None
    lease_lost: bool = False
    cancelled: str | None = None
    """Who has asked to cancel this delivery, and why; None: it goes on."""
    chained: Sequence[NewMessage] = ()
    """Messages that its handler publishes with its ack."""
    no_chain: str = ""
    """Why nothing (more) can be published with its ack; empty: it can."""
    holder: "Holder | None" = field(default=None, repr=False, compare=False)
    """What its handler may ask of the subscriber that claimed it."""
    held_until: float = 0.0
    """Until when its handler has asked to hold it (this process's monotonic seconds)."""
    slot: "Slot | None" = None
    """When its handler may start; None: any time."""
    slot_started: int | None = None
    """When its handler started, by the database's clock (microseconds); None: it has not."""
    slot_told: bool = False
    """Whether the next claim is to tell what became of `slot`."""
    prefetched: bool = False
    """Whether it waits for a worker, and so has the shorter lease."""
    header_key: tuple[str | None] | None = None
    """The key that a header has; None: policies go by the key of the publish."""

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name. They are decoded at each call, which is nearly always one call."""
        return load_headers(self.stored_headers)

    @property
    def policy_key(self) -> str | None:
        """What policies go by."""
        return self.key if self.header_key is None else self.header_key[0]

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

    def renewed(self, at: float, *, shorter: bool = True) -> None:
        """Its lease was renewed at `at` (monotonic seconds); it stays short only if `shorter`."""
        self.renewed_monotonic = at
        self.prefetched = self.prefetched and shorter

    def lose(self) -> None:
        """Its lease is lost: it is another's, or will be."""
        self.lease_lost = True

    def settle_anew(self, outcome: Outcome | None) -> None:
        """Record `outcome` in place of what was recorded; None forgets that."""
        self.outcome = outcome

    def settle_as(self, outcome: Outcome) -> bool:
        """Record `outcome` unless there is one already; return whether it was recorded."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


def note_claimed(
    rows: Iterable[ClaimedMessage],
    at: float,
    holder: "Holder | None" = None,
    asked: float | None = None,
) -> None:
    """`rows` were claimed at `at` by `holder`; the claim was sent at `asked` (monotonic seconds).

    Their leases are counted from `asked`: an answer may come long after the lease has begun.
    """
    # One call for all of them, as in `end_publishing`: a call for each row is a measurable part of
    # what a batch costs.
    leased = at if asked is None else asked
    for row in rows:
        row.claimed_monotonic = at
        row.renewed_monotonic = leased
        row.holder = holder


def end_publishing(rows: Iterable[ClaimedMessage], reason: str) -> None:
    """Nothing more can be published with the ack of `rows`, for this reason; empty: it can."""
    for row in rows:
        row.no_chain = reason


class Claimed(list[ClaimedMessage]):
    """The rows that a claim has leased, and by id the suspects that it found and did not lease."""

    def __init__(
        self, rows: Iterable[ClaimedMessage] = (), suspects: Mapping[int, Suspect] | None = None
    ) -> None:
        """Hold `rows`, which are leased, and `suspects`, which are not."""
        super().__init__(rows)
        self.suspects: dict[int, Suspect] = dict(suspects or {})

    @classmethod
    def without_suspects(
        cls, found: Iterable[ClaimedMessage], suspicion: Suspicion | None
    ) -> "Claimed":
        """Rows that were found but not charged yet, without the suspects among them.

        If `suspicion.told`, the suspects are reported.
        """
        if suspicion is None:
            return cls(found)
        rows = cls()
        of = suspicion.of
        for row in found:
            if (suspect := of(row.deliveries_count - row.attempts_count)) is None:
                rows.append(row)
            elif suspicion.told:
                rows.suspects[row.id] = suspect
        return rows


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Which rows of a claim wait for a worker, and for how long they are leased."""

    after: int
    """How many rows start at once: the first ones."""
    lease: float
    """Seconds for which the other rows are leased."""


@dataclass(frozen=True, slots=True)
class Slot:
    """When the handler of a claimed row may start, by this process's monotonic clock (seconds)."""

    earliest: float
    latest: float
    at: int | None = None
    """The slot that a Throttle granted, by the database's clock: microseconds since 1970."""
    deadline: int | None = None
    """The latest moment of the start that is stored, by the same clock."""
    places: tuple[tuple[str, str], ...] = ()
    """Where that is: scope and key of each log."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What the handler of a claimed row may ask of the subscriber that claimed it."""

    extend: Callable[[Sequence[ClaimedMessage], float], Awaitable[bool]]
    """Hold the rows for this many seconds from now; returns whether all are still held."""
    encode: Callable[[Any], Awaitable[tuple[bytes, str | None]]] | None
    """Encode a body as `publish` does; returns the bytes and the content type."""
    ack_first: bool
    """Whether the rows are removed before the handler starts."""
    log: Callable[..., None] = lambda *_args, **_kwargs: None
    """The subscriber's log function."""
    correlation_ids: CorrelationIds = field(default_factory=CorrelationIds)
    """Of the database that the rows are in."""
    progress: Callable[[ClaimedMessage, float, str | None], Awaitable[bool]] | None = None
    """Write how far the handler of a row has come; returns whether its lease is held."""
    warned: set[str] = field(default_factory=set)
    """Warnings that were logged once and are not repeated."""


@dataclass(slots=True, eq=False)
class Unit:
    """Settlements of one delivery and the messages published with them: all are written in one
    transaction, or none.

    Each settlement refers to its unit, not the unit to its settlements, so there is no reference
    cycle. The settlements of a unit are always adjacent.
    """

    on_ack: Sequence[NewMessage] = ()
    """Messages to insert when the settlements are written."""
    fallback: "Callable[[BaseException | None], list[Settlement]] | None" = None
    """Settlements of the same rows for the case that the database refuses to store `on_ack`; the
    argument is its error, if known."""


NO_KEY = ""
"""In place of a new key: the message has none. No key is empty."""


@dataclass(slots=True)
class Settlement:
    """What is written for one finished delivery, fenced by (id, lease_token).

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
    """Whether first/last_attempt_at are written although no attempt is charged: a handler has
    ended."""
    uncharge: bool = False
    """Whether deliveries_count goes down by one."""
    ended_after: float = 0.0
    """Seconds from the claim to the handler's end; the database adds them to acquired_at."""
    delay: float | None = None
    """Seconds from the database's now to the next attempt; None keeps the due time."""
    reason: str | None = None
    """A code of `core.reasons`, or a handler's own text."""
    related_id: int | None = None
    """The message that the reason is about."""
    error: str | None = None
    fingerprint: str | None = None
    """Of `error`, as `core.settle.error_fingerprint` makes it."""
    queue: str | None = None
    """The queue to move to (attempts and deliveries are reset, dedup_id dropped)."""
    payload: bytes | None = None
    """The body to move with; None keeps it."""
    headers: str | None = None
    """The headers to move with, as JSON text; None keeps them."""
    published_again: bool = False
    """Whether publish_count goes up by one."""
    hop: int | None = None
    """1 counts one more hop, 0 resets the count, None leaves it."""
    key: str | None = None
    """The key to move with; `NO_KEY` takes it away, None keeps it."""
    lookup: str | None = None
    """The lookup value whose record of the message goes, too; None: there is none."""
    unit: Unit | None = None
    """The unit that it belongs to; None: it is written alone."""

    @property
    def ended(self) -> float | None:
        """`ended_after` if a handler has ended, else None."""
        return self.ended_after if self.attempted or self.ran else None

    @property
    def plain_ack(self) -> bool:
        """Whether it is an ack of a handler, without a reason or an error."""
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
        state = self.state  # `in` with a set calls the enum's __hash__, which is slow Python code
        return (
            state is MessageState.COMPLETED
            or state is MessageState.FAILED
            or state is MessageState.DISCARDED
        )


class Acked(Settlement):
    """An ack of a handler without a reason or an error, as for nearly all messages.

    The fields that are always the same are attributes of the class, so that only four fields are
    set for each message.
    """

    __slots__ = ()

    state = MessageState.COMPLETED
    attempted = True
    ran = False
    uncharge = False
    published_again = False
    delay = reason = related_id = hop = error = fingerprint = None
    queue = payload = headers = key = lookup = unit = None
    plain_ack = leaves = True

    def __init__(self, id: int, lease_token: UUID, ended_after: float, archive: bool) -> None:  # noqa: A002
        """Settle `id`; `ended_after` is in seconds, `archive` says whether the row is kept."""
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
    """A claim ignores rows that were due before this time (PostgreSQL); None claims all."""
    unusable: bool = False
    """Whether some of its rows have an invalid due time, which no claim would find (SQLite)."""


class ReadyPairs(list[ReadyPair]):
    """Pairs as they were found `at` the database's time; `took` is how many seconds its server was
    busy (PostgreSQL).
    """

    took = 0.0
    at: datetime | None = None


@dataclass(slots=True)
class Around:
    """What a look for several subscribers has found."""

    pairs: ReadyPairs
    lease_ends_in: float | None
    """Seconds until the first lease of any process ends; None without a lease."""
    orders: Orders | None = None
    """What operators have asked; None: it was not read."""


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """What a process tells the fleet of its subscribers."""

    known: Mapping[str, Mapping[str, Any]]
    """Each subscriber's description of itself, by its name."""
    changed: frozenset[str]
    """The names of those whose description has changed since the last sign."""
    lease: float
    """Seconds for which they count as alive."""


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A message of which it is not known whether its handler ran, or how far it got.

    `AckPolicy.ACK_FIRST` removes a message before its handler starts. Then the process sent no more
    sign of life, or the answer to the removal's COMMIT was lost.
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
    """Ids whose settlement was written, and ids whose lease was lost; both unordered.

    An id in neither set still has to be written: another transaction has locked its row, or a row
    of its unit is locked or lost.
    """

    settled: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
