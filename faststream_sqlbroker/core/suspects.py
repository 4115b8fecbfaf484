"""Suspects: messages that may have killed their process, or that are on their last delivery.

A suspect runs while no other message runs in the process (solo run). If it kills the process
again, no other message loses its lease.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

SUSPECT_AFTER = 2
"""Lost leases from which on a message may have killed its process. One is normal: a machine was
restarted."""
_NEVER = 2**31 - 1
"""The largest INTEGER: no count of deliveries goes beyond it."""


class Suspect(NamedTuple):
    """What is known of a message that runs alone."""

    lost: int
    """Its deliveries that ended without an attempt."""
    last: bool = False
    """Whether its next delivery is the last that is permitted."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How a claim recognises a suspect, which it does not lease.

    A message that has lost more leases than permitted is not a suspect: it ends without a handler.
    """

    losses: int = SUSPECT_AFTER
    """Lost leases from which on a message is a suspect."""
    final: int = _NEVER
    """Lost leases with which its next delivery is the last that is permitted."""
    told: bool = True
    """Whether the claim reports the suspects that it finds, which count towards its limit; else it
    skips them."""

    @classmethod
    def under(cls, max_deliveries: int | None) -> "Suspicion | None":
        """The rule for a subscriber with `max_deliveries` (None: no limit).

        None if no lost lease is permitted: then no message is delivered after one.
        """
        if max_deliveries is None:
            return cls()
        if max_deliveries <= 1:
            return None
        return cls(min(SUSPECT_AFTER, max_deliveries - 1), max_deliveries - 1)

    def untold(self) -> "Suspicion":
        """The same rule for a claim that skips suspects."""
        return replace(self, told=False)

    def of(self, lost: int) -> Suspect | None:
        """Judge a message by its lost leases; None: it is not a suspect."""
        return Suspect(lost, lost == self.final) if self.losses <= lost <= self.final else None

    @property
    def binds(self) -> dict[str, int]:
        """Binds of the statements that leave suspects."""
        return {"losses": self.losses, "final": self.final}
