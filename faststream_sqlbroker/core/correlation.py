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
_PLAIN = 1 << 48
"""Ids below it fill the last part only, as all do that a sequence has drawn."""
_LIMIT = 1 << 62
"""What the last two parts have room for; a greater or negative id is cut."""


def new_database_id() -> str:
    """60 random bits, as the first three parts of a UUID of version 8."""
    digits = os.urandom(8).hex()
    return f"{digits[:8]}-{digits[8:12]}-8{digits[12:15]}"


def is_database_id(value: object) -> bool:
    """Whether `value` is what `new_database_id` makes."""
    return isinstance(value, str) and _PATTERN.fullmatch(value) is not None


class CorrelationIds:
    """Makes the correlation ids of one database's messages."""

    def __init__(self, database_id: str | None = None) -> None:
        """As long as `database_id` is None, messages' own ids take their place."""
        self.database_id = database_id

    @property
    def database_id(self) -> str | None:
        """May be set once it is known; all who make ids share this object."""
        return self._database_id

    @database_id.setter
    def database_id(self, value: str | None) -> None:
        self._database_id = value
        # Of most ids; None if they have none.
        self._plain = None if value is None else f"{value}-8000-%012x"

    def of(self, message_id: int) -> str:
        """The correlation id of a message that has none stored."""
        plain = self._plain
        if plain is None:
            return str(message_id)
        if 0 <= message_id < _PLAIN:
            return plain % message_id
        high, low = divmod(message_id % _LIMIT, _PLAIN)
        return f"{self._database_id}-{0x8000 | high:04x}-{low:012x}"
