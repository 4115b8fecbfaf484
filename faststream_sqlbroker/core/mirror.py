"""The record of a message that was published with a lookup value, kept until the message leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.routing import DESTINATION_HEADER
from faststream_sqlbroker.core.text import format_value, is_storable
from faststream_sqlbroker.exceptions import PublishError

MAX_INFO_LENGTH = 1_000
"""Maximum length of an info text in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredMessage:
    """A live message with a lookup value. Times are aware (UTC) datetimes."""

    id: int
    queue: str
    """Current queue."""
    lookup: str
    info: str | None
    entry_time: datetime
    """Time of the publish with the lookup value."""
    publish_time: datetime
    """Creation time of the message."""
    publish_after: datetime
    """Due time."""
    publish_count: int
    headers: Mapping[str, Any]
    payload: bytes

    @property
    def destination(self) -> str:
        """The queue named in the destination header, else the current queue."""
        return str(self.headers.get(DESTINATION_HEADER) or self.queue)

    @property
    def record(self) -> dict[str, Any]:
        """The record as a mapping.

        Name is the message's id as text, Payload the bytes of the body, Properties the headers.
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


def validate_info(value: object) -> str | None:
    """Check and return an info text, which may be None.

    Raises:
        PublishError: the value is not text, too long, or cannot be stored.
    """
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_INFO_LENGTH or not is_storable(value):
        raise PublishError(
            f"info must be text of at most {MAX_INFO_LENGTH} characters, without NUL characters "
            f"and lone surrogates, got {format_value(value)}"
        )
    return value
