"""The database's time as a process knows it."""

from dataclasses import dataclass

from faststream_sqlbroker.core.policies.options import MICROSECONDS


@dataclass(frozen=True, slots=True)
class ReadTime:
    """The database's time, and between which moments of the process's clock it was read.

    What follows the read, such as a slow COMMIT, says nothing about the database's clock.
    """

    now: int
    """Microseconds since 1970."""
    asked: float
    """Monotonic seconds, as `answered`."""
    answered: float

    @property
    def took(self) -> float:
        """Seconds."""
        return self.answered - self.asked

    def surely_after(self, at: int) -> float:
        """A moment (monotonic) at which the database's clock shows `at` or later."""
        return self.answered + (at - self.now) / MICROSECONDS

    def surely_before(self, at: int) -> float:
        """A moment (monotonic) at which the database's clock shows `at` or earlier."""
        return self.asked + (at - self.now) / MICROSECONDS
