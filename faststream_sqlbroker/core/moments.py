"""Moments as whole microseconds since 1970 (UTC), and back: exact, where floats of seconds are not."""

from datetime import datetime, timedelta, timezone

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
TICK = timedelta(microseconds=1)
"""The least that a moment can be later than another."""


def to_microseconds(moment: datetime) -> int:
    """An aware datetime as microseconds."""
    return (moment - EPOCH) // TICK


def from_microseconds(microseconds: int) -> datetime:
    """Microseconds as an aware datetime (UTC)."""
    return EPOCH + timedelta(microseconds=microseconds)
