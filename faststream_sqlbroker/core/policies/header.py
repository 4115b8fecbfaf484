"""Keys that policies read from a header, in place of the key of the publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.exceptions import SetupError


@dataclass(frozen=True)
class Header:
    """The value of a header is what a policy goes by: `Throttle(10, "1s", key=Header("tenant"))`.

    A message without the header has no key; so has one whose value is no text or whole number of 1
    to 255 characters. The key of the publish stays what it is, for everything else.
    """

    name: str

    def __post_init__(self) -> None:
        """Raise SetupError for a name that no header has."""
        if (problem := name_problem(self.name)) is not None:
            raise SetupError(f"Header({self.name!r}) names no header: {problem}")

    def __str__(self) -> str:
        return f"Header({self.name!r})"

    def key(self, headers: Mapping[str, Any]) -> str | None:
        """The key of a message with these headers; None: it has none."""
        value = headers.get(self.name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        # What no publish may have as its key would not be the same key on every database.
        return value if isinstance(value, str) and name_problem(value) is None else None


Key = bool | Header
"""What a policy goes by: True is the key of the publish, False none."""


def checked_key(name: str, value: object) -> Key:
    """`value` as what a policy goes by.

    Raises:
        SetupError: it is neither a bool nor a Header.
    """
    if not isinstance(value, bool | Header):
        of_faststream = type(value).__module__.partition(".")[0] == "faststream"
        raise SetupError(
            f'{name} must be True, False or faststream_sqlbroker.Header("name"), got {value!r}'
            + (", which is FastStream's Header, for arguments of handlers" if of_faststream else "")
        )
    return value


def keyed(policy: str, value: object) -> Key:
    """The same for a policy that cannot do without a key.

    Raises:
        SetupError: also for False.
    """
    key = checked_key(f"{policy}'s key", value)
    if not key:
        raise SetupError(
            f"{policy} goes by keys: leave key=False out, or name a header, as in "
            'key=Header("tenant")'
        )
    return key


def key_text(name: str, value: Key) -> str:
    """How the text of a policy says what it goes by."""
    return f", {name}={value}" if value else ""
