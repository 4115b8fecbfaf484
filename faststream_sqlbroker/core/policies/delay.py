"""Delay: not before due time + d."""

from dataclasses import dataclass

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.policies.options import microseconds, seconds


@dataclass(frozen=True, init=False)
class Delay:
    """Every message waits `delay` after its due time, once; its retries come when the retry strategy says."""

    length: int
    """Microseconds."""

    def __init__(self, delay: Duration) -> None:
        """`delay` is longer than 0: seconds, a timedelta or text like "5m".

        Raises:
            SetupError: it is not.
        """
        object.__setattr__(self, "length", microseconds("Delay", delay))

    def __str__(self) -> str:
        return f"Delay({seconds(self.length)})"
