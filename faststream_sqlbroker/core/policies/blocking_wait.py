"""BlockingWait: a worker rests after a failure, which slows the whole queue down (back-pressure)."""

from dataclasses import dataclass

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.policies.options import MICROSECONDS, microseconds, seconds


@dataclass(frozen=True, init=False)
class BlockingWait:
    """After a failed attempt its worker waits before the message is nacked and the next one is taken.

    The message stays leased meanwhile. A stop ends the wait.
    """

    length: int
    """Microseconds."""

    def __init__(self, wait: Duration) -> None:
        """`wait` is longer than 0: seconds, a timedelta or text like "2s".

        Raises:
            SetupError: it is not.
        """
        object.__setattr__(self, "length", microseconds("BlockingWait", wait))

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.length / MICROSECONDS

    def __str__(self) -> str:
        return f"BlockingWait({seconds(self.length)})"
