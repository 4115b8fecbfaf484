"""What is kept of a message that was published with a lookup value, until it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.routing import DESTINATION_HEADER
from faststream_sqlbroker.core.text import short, storable
from faststream_sqlbroker.exceptions import PublishError

LONGEST_INFO = 1_000
"""Characters of an info text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredMessage:
    """A live message with its lookup value. Times are aware (UTC) datetimes."""

    id: int
    queue: str
    """Where it is now."""
    lookup: str
    info: str | None
    entry_time: datetime
    """When it was published with its lookup value."""
    publish_time: datetime
    """When the message was made."""
    publish_after: datetime
    """When it is due."""
    publish_count: int
    headers: Mapping[str, Any]
    payload: bytes

    @property
    def destination(self) -> str:
        """The queue that it is meant for: as its header says, else the one that it is in."""
        return str(self.headers.get(DESTINATION_HEADER) or self.queue)

    @property
    def record(self) -> dict[str, Any]:
        """Its record: Name is the message's id as text, Payload the bytes of its body, Properties
        its headers.
        """
        return {
            "Name": str(self.id),
            "DestinationTopic": self.destination,
            "EntryTime": self.entry_time,
            "Info": self.info,
            "Lookup": self.lookup,
            "Payload": self.payload,
            "Properties": dict(self.headers),
            "PublishAfter": self.publish_after,
            "PublishCount": self.publish_count,
            "PublishTime": self.publish_time,
        }


def checked_info(value: object) -> str | None:
    """An info text; None: there is none.

    Raises:
        PublishError: it is not text, too long, or cannot be stored.
    """
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > LONGEST_INFO or not storable(value):
        raise PublishError(
            f"info is text of at most {LONGEST_INFO} characters, without NUL characters and lone "
            f"surrogates, got {short(value)}"
        )
    return value
