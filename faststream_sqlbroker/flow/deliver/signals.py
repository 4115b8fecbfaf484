"""What the parts of one subscriber tell each other without knowing each other."""

from collections.abc import Callable
from dataclasses import dataclass, fields


def _nothing() -> None:
    pass


def _nothing_of(_queues: set[str]) -> None:
    pass


@dataclass(slots=True, kw_only=True)
class Signals:
    """One listener for each signal, called by the part that gives it; without one it does nothing.

    A signal that is given more than once before its listener acts counts once.
    """

    room: Callable[[], None] = _nothing
    """Few claimed rows wait for workers: claim more."""
    looked: Callable[[], None] = _nothing
    """Another subscriber's look has looked for this one, too: claim what it found."""
    scans_slow: Callable[[], None] = _nothing
    """Scans are slow: make them in the background."""
    outcome_added: Callable[[], None] = _nothing
    """Outcomes wait to be written, `Outcomes.notify_at` of them or more."""
    flush_now: Callable[[], None] = _nothing
    """What waits to be written is not to wait for the flush interval."""
    flush_due: Callable[[], None] = _nothing
    """The flush interval is over, or must not be waited for: write."""
    apart_added: Callable[[], None] = _nothing
    """Outcomes were refused or set apart: repeat them when they are due."""
    settled: Callable[[], None] = _nothing
    """Outcomes were written: what they kept back may start."""
    chained: Callable[[set[str]], None] = _nothing_of
    """Messages were inserted into these queues with the outcomes of others."""
    starts_ended: Callable[[], None] = _nothing
    """Handlers of messages that were removed first have ended: write that."""

    def connect(self, listeners: "Signals") -> None:
        """Take over all listeners of `listeners`: for parts that exist before their listeners."""
        for each in fields(self):
            setattr(self, each.name, getattr(listeners, each.name))
