"""What a delivery ended in, as a value: the handler's side says it, `core.settle` decides what it
means.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ack:
    """Done: the message is COMPLETED."""


@dataclass(frozen=True, slots=True)
class Nack:
    """Try again: after `delay` seconds if given, else when the retry strategy says."""

    delay: float | None = None
    error: BaseException | None = None
    retry_possible: bool = False
    """Whether the handler says that nothing of it has been done (policy Once)."""


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
    """As Defer by `retry_in` seconds, until `give_up_after` seconds after its handler's first end:
    then FAILED.
    """

    retry_in: float
    give_up_after: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Handed back unstarted: due time kept, delivery uncharged."""


@dataclass(frozen=True, slots=True)
class Again(Release):
    """Not started, as its batch could not be: the handler gets it again, with the others of the
    same `part`.
    """

    part: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Not done, and not the handler's fault: the delivery is charged, the attempt not.

    It was cut off at the graceful timeout, or what it did could not be committed for a reason that
    passes (`error`).
    """

    delay: float | None = None
    """Seconds until it is due again; None: at once."""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Relocate:
    """To another queue under the same id, with its counters reset, due after `delay` seconds.

    `payload` and `headers` (JSON text) replace the message's own unless they are None.
    """

    queue: str
    payload: bytes | None = None
    headers: str | None = None
    delay: float = 0.0
    published_again: bool = False
    """Whether publish_count goes up by one."""
    is_hop: bool = False
    """Whether the broker itself moves it on: that is counted, and begins anew where a handler moves
    it."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Dropped without a run (expired, duplicate): DISCARDED with `reason`, one of `core.states`."""

    reason: str
    related_id: int | None = None
    """The message that the reason is about."""


Outcome = Ack | Nack | Reject | Defer | NotReady | Release | Abandon | Relocate | Discard
