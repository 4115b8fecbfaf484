"""The outcome of a delivery, as a value. `core.settle` turns it into a database write."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the message is COMPLETED."""


@dataclass(frozen=True, slots=True)
class Skip(Ack):
    """Done without work, at the handler's request: COMPLETED with reason `skipped`."""


@dataclass(frozen=True, slots=True)
class Nack:
    """Try again after `delay` seconds; None leaves the delay to the retry strategy."""

    delay: float | None = None
    error: BaseException | None = None
    retry_possible: bool = False
    """True if the handler has had no effect, so that policy Once may run it again."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Never again: the message is FAILED, with `reason`."""

    reason: str | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """Due again after `delay` seconds, without charging an attempt or a delivery."""

    delay: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class NotReady:
    """Defer by `retry_in` seconds.

    The message is FAILED when `give_up_after` seconds have passed since its handler first ended.
    """

    retry_in: float
    give_up_after: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Released without a run: the due time stays, and no delivery is charged."""


@dataclass(frozen=True, slots=True)
class Again(Release):
    """Not started, because the batch could not start.

    The handler gets the message again, in a batch with the other messages of the same `part`.
    """

    part: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Not done, through no fault of the handler: the delivery is charged.

    No attempt is charged, unless the retry strategy does not limit attempts: such a message must
    not reach the limit of deliveries either.

    The handler was cancelled at the graceful timeout, its transaction could not be committed for a
    transient reason (`error`), or another message of its unit has lost its lease.
    """

    delay: float | None = None
    """Seconds until the message is due again; None for immediately."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Relocate:
    """Moved to another queue under the same id, with reset counters, due after `delay` seconds.

    `payload`, `headers` (JSON text) and `key` replace the message's own values unless they are
    None; an empty `key` removes the key.
    """

    queue: str
    payload: bytes | None = None
    headers: str | None = None
    delay: float = 0.0
    published_again: bool = False
    """True to add one to publish_count."""
    is_hop: bool = False
    """True if the broker itself moves the message (`forward_to`). Such moves are counted; a move by
    a handler resets the count."""
    key: str | None = None
    lookup: str | None = None
    """Lookup value of the message's mirror record, if this move takes the message to its
    destination."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Dropped (expired, duplicate, cancelled): DISCARDED with a `reason` of `core.reasons`."""

    reason: str
    related_id: int | None = None
    """Id of the message that the reason refers to."""
    text: str | None = None
    """New error of the message; None keeps the old error."""
    not_started: bool = False
    """True if no handler has started with this delivery, so that a key claimed by it is free
    again."""


Outcome = Ack | Nack | Reject | Defer | NotReady | Release | Abandon | Relocate | Discard
