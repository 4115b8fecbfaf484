"""Messages that may have killed their process, or that are on their last delivery.

A suspect runs while no other message runs in the process (solo run). If it kills the process
again, no other message loses its lease.
"""

from dataclasses import dataclass
from typing import NamedTuple

SUSPECT_AFTER = 2
"""Number of lost leases that makes a message a suspect. A single lost lease is normal: a machine
was restarted."""
_NEVER = 2**31 - 1
"""The largest INTEGER; no count of deliveries exceeds this."""


class Suspect(NamedTuple):
    """A message that must run alone."""

    lost_leases: int
    """Deliveries that ended without an attempt."""
    is_last: bool = False
    """True if the next delivery is the last permitted one."""


@dataclass(frozen=True, slots=True)
class SuspectRule:
    """The rule by which a claim recognises suspects, which are not leased.

    A message that has lost more leases than permitted is not a suspect: it ends without a handler.
    """

    min_lost: int = SUSPECT_AFTER
    """Number of lost leases from which a message is a suspect."""
    max_lost: int = _NEVER
    """Number of lost leases after which the next delivery is the last permitted one."""
    report: bool = True
    """True if the claim reports suspects, which then count towards its limit; False skips
    suspects."""

    @classmethod
    def from_max_deliveries(cls, max_deliveries: int | None) -> "SuspectRule | None":
        """Build the rule for a subscriber with `max_deliveries` (None: no limit).

        A suspect is a message that has lost leases, so it may have killed its process and must run
        alone. Returns None if no lost lease is permitted: then no message is delivered after a lost
        lease.
        """
        if max_deliveries is None:
            return cls()
        if max_deliveries <= 1:
            return None
        return cls(min(SUSPECT_AFTER, max_deliveries - 1), max_deliveries - 1)

    def as_silent(self) -> "SuspectRule":
        """Return the same rule for a claim that skips suspects.

        A suspect is a message that may have killed its process, and must run alone. Such a claim
        neither reports suspects, nor counts them towards its limit.
        """
        return SuspectRule(self.min_lost, self.max_lost, report=False)

    def classify(self, lost_leases: int) -> Suspect | None:
        """Classify a message by the number of lost leases; returns None for a normal message.

        A lost lease is a delivery that ended without an attempt, for example because the message
        killed its process. Above `max_lost` a message is no suspect either: the next claim ends it
        without a handler.
        """
        return (
            Suspect(lost_leases, lost_leases == self.max_lost)
            if self.min_lost <= lost_leases <= self.max_lost
            else None
        )

    @property
    def binds(self) -> dict[str, int]:
        """Binds of the SQL statements that skip suspects."""
        return {"losses": self.min_lost, "final": self.max_lost}
