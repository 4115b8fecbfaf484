"""Message ids as text, and correlation ids of messages that were published without one.

A database that loses commits, such as an asynchronous standby that takes over, gives their row ids
again. So both ids contain the time of the publish too. Nothing more is stored with a message: its
ids are the same at each delivery, in each process and after the message was archived. A message id
is the row's id and the microseconds since 1970:

    1234-1772366400000000

A correlation id is made of the message's id and random bits that its database has drawn once, so no
other database repeats it. As a UUID (version 8) it looks like this, where the last part is the
row's id in hexadecimal digits, and the first three are the random bits XOR the microseconds:

    5f0c1e2a-93d4-8b17-8000-0000000004d2
"""

import os
import re
from datetime import datetime
from typing import Any

from faststream_sqlbroker.core.checks import is_whole_number
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import (
    MAX_TIMESTAMP,
    MIN_TIMESTAMP,
    from_microseconds,
    to_microseconds,
)
from faststream_sqlbroker.exceptions import SetupError

_PATTERN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}")
MAX_ID = 2**63 - 1
"""Maximum value of the id column, a signed integer of 64 bits."""
_MESSAGE_ID = re.compile(r"(-?[0-9]{1,19})(?:-(-?[0-9]{1,18}))?", re.ASCII)
"""A row's id, also with the time of the publish; 2**63 has 19 digits."""
_LAST_PART_LIMIT = 1 << 48
"""Ids below this fit into the last part, as do all ids drawn from a sequence."""
_ID_LIMIT = 1 << 62
"""Capacity of the last two parts; a greater or negative id is cut."""
_TIME_LIMIT = 1 << 60
"""Capacity of the first three parts, without the digit of the version."""


def build_message_id(row_id: int, created_at: datetime) -> str:
    """Return the message id of a row."""
    return f"{row_id}-{to_microseconds(created_at)}"


def parse_message_id(message_id: int | str) -> tuple[int, datetime | None]:
    """Parse a row's id, also as text, or a message id.

    Returns:
        The row's id; and the time of the publish, None if only the row's id is given.

    Raises:
        SetupError: `message_id` is none of these.
    """
    row_id: Any = message_id
    published_at = None
    if isinstance(message_id, str) and (match := _MESSAGE_ID.fullmatch(message_id)):
        row_id = int(match[1])
        published_at = None if match[2] is None else int(match[2])
    if (
        not is_whole_number(row_id)
        or not -MAX_ID <= row_id <= MAX_ID
        or not MIN_TIMESTAMP <= (published_at or 0) <= MAX_TIMESTAMP
    ):
        raise SetupError(
            "message_id must be a 64-bit integer, as returned by publish, or the text of "
            f"message.message_id, got {format_value(message_id)}"
        )
    return row_id, None if published_at is None else from_microseconds(published_at)


def create_database_id() -> str:
    """Return 60 random bits as the first three parts of a UUID of version 8."""
    digits = os.urandom(8).hex()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}"


def is_database_id(value: object) -> bool:
    """Return True if `value` has the format of `create_database_id`."""
    return isinstance(value, str) and _PATTERN.fullmatch(value) is not None


class CorrelationIds:
    """The correlation ids of the messages of a database."""

    def __init__(self, database_id: str | None = None) -> None:
        """Without a `database_id`, message ids are used instead.

        It may be set later; all users of the ids share this object.
        """
        self.database_id = database_id

    def build_id(self, row_id: int, created_at: datetime) -> str:
        """Return the correlation id of a message that has no stored id.

        It is derived instead of stored, because storing it would slow down each publish. The last
        12 digits are the row's id. An id of more than 48 bits also uses the part before.
        """
        if self.database_id is None:
            return build_message_id(row_id, created_at)
        first, second, third = self.database_id.split("-")
        bits = int(first + second + third[1:], 16) ^ to_microseconds(created_at) % _TIME_LIMIT
        high, low = divmod(row_id % _ID_LIMIT, _LAST_PART_LIMIT)
        digits = f"{bits:015x}"
        return f"{digits[:8]}-{digits[8:12]}-8{digits[12:]}-{0x8000 | high:04x}-{low:012x}"
