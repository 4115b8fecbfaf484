"""Lengths of time by which the archive may be partitioned; all bounds are midnights of UTC."""

from datetime import datetime, timedelta, timezone

SIZES = ("day", "week", "month")
"""What `archive_partitions` may be; weeks begin on Monday."""
AHEAD = 4
"""Partitions that are kept ready behind the current one."""


def start_of(moment: datetime, size: str) -> datetime:
    """The start of the partition that `moment` belongs to."""
    day = moment.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    if size == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if size == "month" else day


def next_start(start: datetime, size: str) -> datetime:
    """The start of the partition after the one that begins at `start`."""
    longest = {"day": 1, "week": 7, "month": 31}[size]
    return start_of(start + timedelta(days=longest), size)


def wanted(now: datetime, size: str) -> list[tuple[datetime, datetime]]:
    """Start and end of the current partition, and of the next `AHEAD`."""
    start = start_of(now, size)
    found = []
    for _ in range(AHEAD + 1):
        end = next_start(start, size)
        found.append((start, end))
        start = end
    return found
