"""Messages as they are inserted, claimed and settled."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.correlation import CorrelationIds, build_message_id
from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.outcome import Outcome
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.core.text import load_headers

_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)

Leases = Sequence[tuple[int, UUID]]
"""Message ids, each with the token of its lease."""


@dataclass(slots=True)
class NewMessage:
    """A row to insert.

    `headers` is JSON text. Times are aware datetimes, or seconds from now.
    """

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
    """Lookup value of the mirror record. If None, the message is not mirrored."""
    info: str | None = None


StoredTimestamp = datetime | bytes
"""A time as the driver returned it: an aware datetime, a naive one (UTC) or PostgreSQL's bytes.
`decode_timestamp` converts it on first use; most messages never need it."""


def decode_timestamp(value: StoredTimestamp) -> datetime:
    """Return `value` as an aware datetime (UTC).

    Bytes are PostgreSQL's timestamptz_send: microseconds since 2000, big-endian.
    """
    if isinstance(value, bytes):
        return _EPOCH + timedelta(microseconds=int.from_bytes(value, signed=True))
    return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


@dataclass(slots=True)
class ClaimedMessage:
    """A row leased to this process; FastStream's raw message. Times are aware (UTC) datetimes.

    `outcome` is the result of the delivery; the first one recorded wins. `claimed_monotonic` is
    this process's monotonic clock at the claim (seconds) and only serves to measure durations.
    """

    id: int
    queue: str
    payload: bytes
    stored_headers: Any
    """Headers as selected: a mapping, JSON text, or anything else that another program has
    stored."""
    priority: int
    key: str | None
    attempts_count: int
    deliveries_count: int
    publish_count: int
    created: StoredTimestamp
    due: StoredTimestamp
    expires_at: datetime | None
    first_attempt_at: datetime | None
    last_attempt_at: datetime | None
    acquired: StoredTimestamp
    lease_token: UUID
    hops: int = 0
    """Moves by `forward_to` since a handler last ran."""
    claimed_monotonic: float = 0.0
    renewed_monotonic: float = 0.0
    locked_monotonic: float = 0.0
    """Last time a renewal found the row locked by another transaction (monotonic seconds). That
    lock keeps the lease alive."""
    outcome: Outcome | None = None
    lease_lost: bool = False
    cancelled: str | None = None
    """Name of the operator who requested the cancellation, and the reason; None without a
    request."""
    chained: Sequence[NewMessage] = ()
    """Messages that the handler publishes together with its ack."""
    no_chain_reason: str = ""
    """Reason why nothing (more) can be published with the ack; empty if publishing is possible."""
    services: "HandlerServices | None" = field(default=None, repr=False, compare=False)
    """Services of the claiming subscriber for the handler."""
    held_until: float = 0.0
    """Time until which the handler has asked to keep the lease (this process's monotonic
    seconds)."""
    slot: "Slot | None" = None
    """Times between which the handler may start; None if it may start at any time."""
    slot_started: int | None = None
    """Start of the handler by the database's clock (microseconds); None before the start."""
    report_slot: bool = False
    """True if the next claim must report the use of `slot`."""
    prefetched: bool = False
    """True if the message waits for a worker and therefore has the shorter lease."""
    header_key: tuple[str | None] | None = None
    """Policy key from a header; None if policies use the key of the publish."""
    once_header_key: tuple[str | None] | None = None
    """Key of policy Once from a header; None if Once uses the key of the publish."""

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name, decoded on each access; nearly always there is a single access."""
        return load_headers(self.stored_headers)

    @property
    def message_id(self) -> str:
        """The row's id with the time of the publish, as text."""
        return build_message_id(self.id, self.created_at)

    def build_correlation_id(self, ids: CorrelationIds | None = None) -> str:
        """Return the generated correlation id.

        It is generated by `ids`, by default by those of the subscriber that has claimed the row.
        """
        if ids is None:
            ids = CorrelationIds() if self.services is None else self.services.correlation_ids
        return ids.build_id(self.id, self.created_at)

    @property
    def policy_key(self) -> str | None:
        """The key that policies use, except for Once, which has `once_key`."""
        return self.key if self.header_key is None else self.header_key[0]

    @property
    def once_key(self) -> str | None:
        """The key that policy Once claims before the handler starts."""
        return self.key if self.once_header_key is None else self.once_header_key[0]

    @property
    def created_at(self) -> datetime:
        """Time of the publish."""
        return decode_timestamp(self.created)

    @property
    def next_attempt_at(self) -> datetime:
        """Due time of this delivery."""
        return decode_timestamp(self.due)

    @property
    def acquired_at(self) -> datetime:
        """Time of the claim."""
        return decode_timestamp(self.acquired)

    def record_renewal(self, at: float, *, shorter: bool = True) -> None:
        """Record a lease renewal at `at` (monotonic seconds).

        A message that waits for a worker has a shorter lease than a running one. `shorter` is
        False if this renewal gave it the full lease; it then no longer counts as waiting.
        """
        self.renewed_monotonic = at
        self.prefetched = self.prefetched and shorter

    def mark_lease_lost(self) -> None:
        """Mark the lease as lost: another process has the message, or soon will."""
        self.lease_lost = True

    def replace_outcome(self, outcome: Outcome | None) -> None:
        """Replace the recorded outcome; None clears it."""
        self.outcome = outcome

    def record_outcome(self, outcome: Outcome) -> bool:
        """Record `outcome` and return True; return False if there already is an outcome."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True


def format_row_ids(raw: ClaimedMessage | Sequence[ClaimedMessage]) -> str:
    """Return the id of a row as text, as in logs; of a batch the first and the last, as "1-9"."""
    return str(raw.id) if isinstance(raw, ClaimedMessage) else f"{raw[0].id}-{raw[-1].id}"


def record_claim(
    rows: Iterable[ClaimedMessage],
    at: float,
    services: "HandlerServices | None" = None,
    requested_at: float | None = None,
) -> None:
    """Record that `rows` were claimed at `at` (monotonic seconds).

    Leases count from `requested_at`, when the claim was sent, because the answer may arrive long
    after the lease has begun.
    """
    # A single call for all rows: a call per row is a measurable part of the cost of a batch.
    started_at = at if requested_at is None else requested_at
    for row in rows:
        row.claimed_monotonic = at
        row.renewed_monotonic = started_at
        row.services = services


def set_no_chain_reason(rows: Iterable[ClaimedMessage], reason: str) -> None:
    """Set the reason why no message can be published with the ack of `rows`; empty allows it."""
    for row in rows:
        row.no_chain_reason = reason


class ClaimedMessages(list[ClaimedMessage]):
    """The rows leased by a claim, and by id the suspects that were found but not leased."""

    def __init__(
        self, rows: Iterable[ClaimedMessage] = (), suspects: Mapping[int, Suspect] | None = None
    ) -> None:
        """Store the leased `rows` and the unleased `suspects`."""
        super().__init__(rows)
        self.suspects: dict[int, Suspect] = dict(suspects or {})

    @classmethod
    def from_rows(
        cls, rows: Iterable[ClaimedMessage], rule: SuspectRule | None
    ) -> "ClaimedMessages":
        """Build the result of a claim, without the suspects.

        A suspect is a message that may have killed its process, so it must run alone and is not
        leased together with other rows. The suspects are reported if `rule.report` is set. The
        claim has not yet added to the delivery counts of `rows`.
        """
        if rule is None:
            return cls(rows)
        messages = cls()
        classify = rule.classify
        for row in rows:
            # Deliveries without an attempt ended in a lost lease, perhaps by a crash.
            if (suspect := classify(row.deliveries_count - row.attempts_count)) is None:
                messages.append(row)
            elif rule.report:
                messages.suspects[row.id] = suspect
        return messages


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Rows of a claim that wait for a worker, and the length of their leases."""

    start_count: int
    """Number of rows that start immediately; these are the first rows."""
    lease: float
    """Lease of the other rows in seconds."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The times between which a handler may start (this process's monotonic seconds)."""

    earliest: float
    latest: float
    granted_at: int | None = None
    """Slot granted by a Throttle, by the database's clock: microseconds since 1970."""
    deadline: int | None = None
    """Stored latest time of the start, by the same clock."""
    log_keys: tuple[tuple[str, str], ...] = ()
    """Scope and key of each slot log that has the start."""


@dataclass(frozen=True, slots=True)
class HandlerServices:
    """Services of a subscriber for the handlers of the claimed rows."""

    extend: Callable[[Sequence[ClaimedMessage], float], Awaitable[bool]]
    """Hold the rows for this many seconds from now; returns True if all leases are still held."""
    encode: Callable[[Any], Awaitable[tuple[bytes, str | None]]] | None
    """Encode a body as `publish` does; returns the bytes and the content type."""
    ack_first: bool
    """True if the rows are removed before the handler starts."""
    log: Callable[..., None] = lambda *_args, **_kwargs: None
    """The subscriber's log function."""
    correlation_ids: CorrelationIds = field(default_factory=CorrelationIds)
    """Correlation ids of the rows' database."""
    progress: Callable[[ClaimedMessage, float, str | None], Awaitable[bool]] | None = None
    """Write the progress of a row's handler; returns True if the lease is still held."""
    warned: set[str] = field(default_factory=set)
    """Warnings that have been logged once and are not repeated."""


@dataclass(slots=True, eq=False)
class Unit:
    """Settlements of a delivery and the messages published together, written all or none.

    All of them are written in one transaction. Each settlement refers to its unit, not the unit to
    its settlements, so there is no reference cycle. The settlements of a unit are always adjacent.
    """

    on_ack: Sequence[NewMessage] = ()
    """Messages to insert when the settlements are written."""
    fallback: "Callable[[BaseException | None], list[Settlement]] | None" = None
    """Builds settlements of the same rows for the case that the database refuses to store `on_ack`;
    the argument is the error, if known."""


REMOVED_KEY = ""
"""New key that removes the message's key. A real key is never empty."""


@dataclass(slots=True)
class Settlement:
    """The write for a finished delivery, fenced by (id, lease_token).

    With the state COMPLETED, FAILED or DISCARDED the row leaves the message table (for the archive
    if `archive`). With PENDING or RETRYABLE it stays. None restores the state before the claim.
    """

    id: int
    lease_token: UUID
    state: MessageState | None
    archive: bool = True
    attempted: bool = True
    """True to add one to attempts_count and to write first/last_attempt_at."""
    ran: bool = False
    """True to write first/last_attempt_at although no attempt is charged, because a handler has
    ended."""
    uncharge: bool = False
    """True to subtract one from deliveries_count."""
    ended_after: float = 0.0
    """Seconds from the claim to the end of the handler; the database adds them to acquired_at."""
    delay: float | None = None
    """Seconds from the database's now to the next attempt; None keeps the due time."""
    reason: str | None = None
    """A code of `core.reasons`, or a text from the handler."""
    related_id: int | None = None
    """Id of the message that the reason refers to."""
    error: str | None = None
    fingerprint: str | None = None
    """Fingerprint of `error`, from `core.settle.compute_fingerprint`."""
    queue: str | None = None
    """Queue to move the message to; attempts and deliveries are reset, dedup_id is removed."""
    payload: bytes | None = None
    """New body after a move; None keeps the body."""
    headers: str | None = None
    """New headers after a move, as JSON text; None keeps the headers."""
    published_again: bool = False
    """True to add one to publish_count."""
    hop: int | None = None
    """1 adds a hop, 0 resets the count, None leaves it unchanged."""
    key: str | None = None
    """New key after a move; `REMOVED_KEY` removes the key, None keeps it."""
    lookup: str | None = None
    """Lookup value of the mirror record to remove with the message; None if there is no record."""
    unit: Unit | None = None
    """Unit that this settlement belongs to; None if it is written alone."""

    @property
    def handler_duration(self) -> float | None:
        """`ended_after` if a handler has ended, else None."""
        return self.ended_after if self.attempted or self.ran else None

    @property
    def is_plain_ack(self) -> bool:
        """True for an ack of a handler without a reason or an error.

        Such settlements are written with fewer values.
        """
        return (
            self.state is MessageState.COMPLETED
            and self.attempted
            and not self.uncharge
            and self.reason is None
            and self.error is None
        )

    @property
    def is_final(self) -> bool:
        """True if the row leaves the message table."""
        state = self.state  # not `in` with a set: the enum's __hash__ is slow Python code
        return (
            state is MessageState.COMPLETED
            or state is MessageState.FAILED
            or state is MessageState.DISCARDED
        )


class AckSettlement(Settlement):
    """The ack of a handler without a reason or an error, as for nearly all messages.

    Fields with a constant value are class attributes, so only four fields are set per message.
    """

    __slots__ = ()

    state = MessageState.COMPLETED
    attempted = True
    ran = False
    uncharge = False
    published_again = False
    delay = reason = related_id = hop = error = fingerprint = None
    queue = payload = headers = key = lookup = unit = None
    is_plain_ack = is_final = True

    def __init__(self, id: int, lease_token: UUID, ended_after: float, archive: bool) -> None:  # noqa: A002
        """Settle `id`; `ended_after` is in seconds, `archive` is True to archive the row."""
        self.id = id
        self.lease_token = lease_token
        self.ended_after = ended_after
        self.archive = archive


@dataclass(slots=True)
class ReadyPair:
    """A (queue, priority) with claimable rows.

    `due_in` is the time in seconds until the first row is due; 0 or less means now.
    """

    queue: str
    priority: int
    due_in: float
    due_at: datetime | None = None
    """Due time of the first row, if the database returns it (PostgreSQL)."""
    since: datetime | None = None
    """Rows due before this time are ignored by a claim (PostgreSQL); None claims all rows."""
    has_invalid_due: bool = False
    """True if some rows have an invalid due time, which no claim would find (SQLite)."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """The rows that a claim leases: the first due rows by pair, due time and id."""

    pairs: Sequence[ReadyPair]
    limit: int
    """Maximum number of rows."""
    lease: float
    """Seconds."""
    token: UUID
    """Marks the rows as leased by this claim: a settlement must name it."""
    suspect_rule: SuspectRule | None = None
    """With a rule, no suspect is leased. A suspect is a message that has lost its lease twice or
    more (with max_deliveries=2: once) and may kill its process, so it must run alone: a crash would
    count against every message that runs at the same time."""
    prefetch: Prefetch | None = None
    """Only the first rows get `lease`. The others wait in the process for a worker: they are leased
    for `prefetch.lease`, with `ClaimedMessage.prefetched` set."""


class ReadyPairs(list[ReadyPair]):
    """The pairs found by a query.

    `at` is the database's time of the query, `duration` the seconds that the server was busy with
    it (PostgreSQL).
    """

    duration = 0.0
    at: datetime | None = None


@dataclass(slots=True)
class PollResult:
    """The result of a poll for several subscribers."""

    pairs: ReadyPairs
    lease_ends_in: float | None
    """Seconds until the first lease of any process ends; None without a lease."""
    requests: OperatorRequests | None = None
    """Requests of operators; None if they were not read."""


@dataclass(frozen=True, slots=True)
class HeartbeatData:
    """The data about all subscribers that a process writes with each heartbeat."""

    descriptions: Mapping[str, Mapping[str, Any]]
    """Each subscriber's description of itself, by name."""
    changed_names: frozenset[str]
    """Names of the subscribers whose description has changed since the last heartbeat."""
    lease_seconds: float
    """Seconds for which the subscribers count as alive."""


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A message whose handler may or may not have run.

    `AckPolicy.ACK_FIRST` removes a message before its handler starts. Then the process stopped
    sending heartbeats, or the answer to the removal's COMMIT was lost.
    """

    message_id: int
    queue: str
    key: str | None
    started_at: datetime
    """Time of the removal (the database's clock, aware, UTC)."""
    worker: str
    """Host and process id of the worker."""


@dataclass(slots=True)
class SettleResult:
    """Ids of the settlements that were written, and ids whose lease was lost; both unordered.

    An id in neither set must still be written: another transaction has locked its row, or a row
    of its unit is locked or lost.
    """

    settled_ids: set[int] = field(default_factory=set)
    lost_ids: set[int] = field(default_factory=set)
