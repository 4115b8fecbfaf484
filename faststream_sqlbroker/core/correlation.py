"""Correlation ids of messages that were published without one.

Nothing is stored with a message: its correlation id is made of its id and of random bits that its
database has drawn once. So it is the same at each delivery, in each process and after the message
was archived, and no other database repeats it. As a UUID (version 8) it looks like this, where the
last part is the message's id in hexadecimal digits:

    5f0c1e2a-93d4-8b17-8000-0000000004d2
"""

import os
import re

_PATTERN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}")
_LAST_PART_LIMIT = 1 << 48
"""Ids below this fit into the last part, as do all ids drawn from a sequence."""
_ID_LIMIT = 1 << 62
"""Capacity of the last two parts; a greater or negative id is cut."""


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
        """Without a `database_id`, the messages' own ids are used instead."""
        self.database_id = database_id

    @property
    def database_id(self) -> str | None:
        """The database's id, which may be set later; all users of the ids share this object."""
        return self._database_id

    @database_id.setter
    def database_id(self, value: str | None) -> None:
        self._database_id = value
        # Template for most ids; None without a database id.
        self._template = None if value is None else f"{value}-8000-%012x"

    def build_id(self, message_id: int) -> str:
        """Return the correlation id of a message that has no stored id.

        It is derived instead of stored, because storing it would slow down each publish. The last
        12 digits are the message's id. An id of more than 48 bits also uses the part before.
        """
        template = self._template
        if template is None:
            return str(message_id)
        if 0 <= message_id < _LAST_PART_LIMIT:
            return template % message_id
        high, low = divmod(message_id % _ID_LIMIT, _LAST_PART_LIMIT)
        return f"{self._database_id}-{0x8000 | high:04x}-{low:012x}"
