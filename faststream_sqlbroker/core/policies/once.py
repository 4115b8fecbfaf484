"""Once: at most one run for each key."""

from dataclasses import dataclass
from typing import Literal

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.policies.options import WITHOUT_KEY, microseconds, seconds


@dataclass(frozen=True, init=False)
class Once:
    """Of all messages of a key, one is handled, at most once.

    The key is claimed, and that committed, before the handler starts; it stays claimed for `ttl`. Other messages of the
    key are DISCARDED as duplicates. A handler that raises `RetryPossible` gives the key back and is tried again; any
    other error ends its message. After a crash nobody knows how far the handler came: the message is FAILED
    ("unknown_outcome") and listed by `broker.admin.unknown()`.
    """

    ttl: int
    """Microseconds."""
    without_key: str

    def __init__(
        self, ttl: Duration, *, without_key: Literal["deliver", "dead_letter"] = "deliver"
    ) -> None:
        """Say how long a key stays claimed.

        Args:
            ttl: From the start of its handler.
            without_key: What becomes of a message without a key: it is handled as usual, or it is FAILED.

        Raises:
            SetupError: a ttl that is not longer than 0.
        """
        object.__setattr__(self, "ttl", microseconds("Once's ttl", ttl))
        one_of("Once's without_key", without_key, WITHOUT_KEY)
        object.__setattr__(self, "without_key", without_key)

    def __str__(self) -> str:
        return f"Once({seconds(self.ttl)})"
