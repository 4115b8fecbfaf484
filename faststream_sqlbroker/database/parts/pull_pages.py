"""Pages of the jobs that may be taken, and where the next page begins."""

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.channels import PullJob
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds

PAGE_BYTES = 8 * 1024 * 1024
"""Bytes of the bodies of one page; a page of large jobs is shorter, but never empty."""
LARGEST_ID = 2**63 - 1
"""Of a job; drivers refuse larger numbers."""


@dataclass(frozen=True, slots=True)
class JobsPage:
    """Jobs that may be taken."""

    jobs: list[PullJob]
    following: str | None
    """Where the next page begins."""
    overdue: bool
    """Whether the queue has leases that have ended: their jobs are not in the page yet."""
    expired: list[int]
    """Jobs that stand among those of the page, and have expired long ago."""


def cursor(priority: int, due: datetime, job_id: int) -> str:
    """The position of a page's last job, as text."""
    position = [priority, to_microseconds(due), job_id]
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def position(text: str) -> tuple[int, Any, int]:
    """Priority, due time and id of a `cursor`.

    Raises:
        NotACursorError: it is none.
    """
    try:
        priority, due, last = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if any(type(each) is not int for each in (priority, due, last)):
            raise NotACursorError
        if not 0 <= last <= LARGEST_ID:
            raise NotACursorError
        return priority, from_microseconds(due), last
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise NotACursorError from error
