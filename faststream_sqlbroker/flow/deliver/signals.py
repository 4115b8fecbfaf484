"""Signals between the parts of one subscriber, which do not know each other."""

from collections.abc import Callable
from dataclasses import dataclass, fields


def _ignore() -> None:
    pass


def _ignore_queues(_queues: set[str]) -> None:
    pass


@dataclass(slots=True, kw_only=True)
class Signals:
    """A listener per signal, called by the part that sends the signal; does nothing by default.

    A signal that is sent more than once before its listener acts counts once.
    """

    capacity_free: Callable[[], None] = _ignore
    """Few claimed rows wait for workers: claim more."""
    shared_poll_done: Callable[[], None] = _ignore
    """Another subscriber's poll has covered this one, too: claim what it found."""
    scans_slow: Callable[[], None] = _ignore
    """Polls are slow: run them in the background."""
    outcome_added: Callable[[], None] = _ignore
    """At least as many outcomes wait as `Outcomes.set_notify_count` has set."""
    flush_now: Callable[[], None] = _ignore
    """Waiting outcomes must not wait for the flush interval."""
    flush_due: Callable[[], None] = _ignore
    """The flush interval is over, or must not be waited for: write."""
    outcome_quarantined: Callable[[], None] = _ignore
    """Outcomes were quarantined: repeat them when they are due."""
    settled: Callable[[], None] = _ignore
    """Outcomes were written: messages that they held back may start."""
    chained: Callable[[set[str]], None] = _ignore_queues
    """Messages were inserted into these queues with the outcomes of others."""
    starts_ended: Callable[[], None] = _ignore
    """Handlers of messages that were removed first have ended: write that."""

    def connect(self, listeners: "Signals") -> None:
        """Copy all listeners of `listeners`, for parts that exist before their listeners."""
        for field in fields(self):
            setattr(self, field.name, getattr(listeners, field.name))
