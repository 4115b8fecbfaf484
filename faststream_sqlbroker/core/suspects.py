"""Which messages run alone: those that may have killed their process, and those on their last
delivery.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

SUSPECT_AFTER = 2
"""Lost leases of a message that may be what killed its process; one is normal when a machine
restarts."""
_NEVER = 2**31 - 1


class Suspect(NamedTuple):
    """What is known of a message that runs alone."""

    lost: int
    """Its deliveries that ended without an attempt."""
    last: bool = False
    """Whether its next delivery is the last that is permitted, so that it never has company."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How a claim knows a suspect, which it leaves where it is.

    What was delivered more often than is permitted is none: it ends without a handler.
    """

    losses: int = SUSPECT_AFTER
    """From so many lost leases on."""
    final: int = _NEVER
    """Deliveries before the last that is permitted."""
    told: bool = True
    """Whether the claim tells of the suspects that it meets, in the room of others; else it passes
    over them."""

    @classmethod
    def under(cls, max_deliveries: int | None) -> "Suspicion | None":
        """With `max_deliveries` (None: no limit); None where nothing runs alone, as there is one
        delivery only.
        """
        if max_deliveries is None:
            return cls()
        if max_deliveries <= 1:
            return None
        return cls(min(SUSPECT_AFTER, max_deliveries - 1), max_deliveries - 1)

    def untold(self) -> "Suspicion":
        """The same for a claim that passes over suspects."""
        return replace(self, told=False)

    def of(self, deliveries: int, attempts: int) -> Suspect | None:
        """The suspect that a message with these counts is, before its next delivery."""
        lost = deliveries - attempts
        if deliveries == self.final or (deliveries < self.final and lost >= self.losses):
            return Suspect(lost, deliveries == self.final)
        return None

    @property
    def binds(self) -> dict[str, int]:
        """For the statements that ask `dialects.base.SUSPECT`."""
        return {"losses": self.losses, "final": self.final}
