"""What is known of a lock from outside."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that somebody has. Times are the database's (aware, UTC)."""

    key: str
    fence: int
    """How often the lock was taken, this time included."""
    acquired_at: datetime
    held_until: datetime
    """When its lease runs out unless it is renewed."""
    worker: str
    """Host and process id of the holder."""
