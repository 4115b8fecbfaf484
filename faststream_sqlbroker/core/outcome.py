"""The outcome of a delivery, as a value. `core.settle` decides what it means for the row."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the message is COMPLETED."""


@dataclass(frozen=True, slots=True)
class Skip(Ack):
    """Done without work, as the handler has asked for: COMPLETED with reason `skipped`."""


@dataclass(frozen=True, slots=True)
class Nack:
    """Try again after `delay` seconds; None leaves the delay to the retry strategy."""

    delay: float | None = None
    error: BaseException | None = None
    retry_possible: bool = False
    """Whether the handler has had no effect, so that policy Once may run it again."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Never again: the message is FAILED, with `reason`."""

    reason: str | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """Not now: due again after `delay` seconds; neither an attempt nor a delivery is charged."""

    delay: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class NotReady:
    """As Defer by `retry_in` seconds.

    The message is FAILED when `give_up_after` seconds have passed since its handler first ended.
    """

    retry_in: float
    give_up_after: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Given back without a run: the due time stays, the delivery is not charged."""


@dataclass(frozen=True, slots=True)
class Again(Release):
    """Not started, because its batch could not start.

    The handler gets it again, in a batch with the others of the same `part`.
    """

    part: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Not done, and not the handler's fault: the delivery is charged.

    No attempt is charged, unless the retry strategy does not limit attempts: then this must not
    reach the limit of deliveries either.

    The handler was cancelled at the graceful timeout, or its transaction could not be committed
    for a transient reason (`error`).
    """

    delay: float | None = None
    """Seconds until it is due again; None: at once."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Relocate:
    """To another queue under the same id, with its counters reset, due after `delay` seconds.

    `payload`, `headers` (JSON text) and `key` replace the message's own unless they are None; an
    empty `key` takes it away.
    """

    queue: str
    payload: bytes | None = None
    headers: str | None = None
    delay: float = 0.0
    published_again: bool = False
    """Whether publish_count goes up by one."""
    is_hop: bool = False
    """Whether the broker itself moves the message (`forward_to`). Such moves are counted; a move
    by a handler resets the count."""
    key: str | None = None
    lookup: str | None = None
    """The lookup value by which it is mirrored, if this takes it to its destination."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Dropped (expired, duplicate, cancelled): DISCARDED with `reason`, of `core.reasons`."""

    reason: str
    related_id: int | None = None
    """The message that the reason is about."""
    text: str | None = None
    """What becomes the message's error; None leaves that."""
    not_started: bool = False
    """No handler has begun with this delivery, so a key that it has claimed is free again."""


Outcome = Ack | Nack | Reject | Defer | NotReady | Release | Abandon | Relocate | Discard
