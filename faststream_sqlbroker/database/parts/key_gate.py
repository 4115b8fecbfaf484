"""What decides, besides the leases of a key, whether its next message may start."""

from collections.abc import Iterable
from typing import Protocol

Key = str | bytes
"""As selected: SQLite gives bytes, which need not be text."""
UNLIMITED = 1 << 30
"""More leases than a key can have."""


class KeyGate(Protocol):
    """What else decides whether a message of a key may start: a policy by key."""

    scope: str
    """Of its states, whose `due_at` says when there is something to do for a key."""

    def look(self, keys: Iterable[Key]) -> None:
        """Prepare for the questions about `keys`."""

    def admits(self, key: Key) -> bool:
        """Whether one more message of this key may start."""

    def use_index(self) -> None:
        """The oldest messages are not enough: keys are read by the time at which they are due."""

    def idle(self, keys: Iterable[Key]) -> None:
        """No message of `keys` can be claimed."""

    def arrivals(self) -> tuple[list[int], bool]:
        """Messages that have become due since the last look, and whether there are more."""

    def looks_at_all(self) -> bool:
        """Whether it is time to look at every key: some may have been missed."""
