"""Keys that policies read from a header, in place of the key of the publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.core.checks import check_choice, find_name_error, is_whole_number
from faststream_sqlbroker.core.policies.argument_checks import WITHOUT_KEY
from faststream_sqlbroker.exceptions import SetupError


@dataclass(frozen=True)
class Header:
    """The header whose value is the key of a policy: `Throttle(10, "1s", key=Header("tenant"))`.

    A message without the header has no key. Nor has a message whose value is not text (or a whole
    number) of 1 to 255 characters. Everything else still uses the key of the publish.
    """

    name: str

    def __post_init__(self) -> None:
        """Raise SetupError if the name is invalid for a header."""
        if (error := find_name_error(self.name)) is not None:
            raise SetupError(f"Header({self.name!r}) is not a valid header: {error}")

    def __str__(self) -> str:
        return f"Header({self.name!r})"

    def key(self, headers: Mapping[str, Any]) -> str | None:
        """Return the key of a message with these headers, or None without a key.

        A whole number counts as its text; any other value gives no key.
        """
        value = headers.get(self.name)
        if is_whole_number(value):
            value = str(value)
        # A value that is invalid as a publish key would not be the same key on every database.
        return value if isinstance(value, str) and find_name_error(value) is None else None


Key = bool | Header
"""Key of a policy: True is the key of the publish, False is no key."""


def validate_key(name: str, value: object) -> Key:
    """Check and return a key option.

    Raises:
        SetupError: the value is neither a bool nor a Header.
    """
    if not isinstance(value, bool | Header):
        of_faststream = type(value).__module__.partition(".")[0] == "faststream"
        raise SetupError(
            f'{name} must be True, False or faststream_sqlbroker.Header("name"), got {value!r}'
            + (", which is FastStream's Header for handler arguments" if of_faststream else "")
        )
    return value


def check_required_key(policy: str, value: object, without_key: object) -> None:
    """Check the options `key` and `without_key` of a policy that needs a key.

    Raises:
        SetupError: the value is False, or neither a bool nor a Header, or `without_key` is invalid.
    """
    if not validate_key(f"{policy}'s key", value):
        raise SetupError(
            f'{policy} needs a key: omit key=False, or name a header, as in key=Header("tenant")'
        )
    check_choice(f"{policy}'s without_key", without_key, WITHOUT_KEY)


def format_key(name: str, value: Key) -> str:
    """Format the key as part of a policy's text."""
    return f", {name}={value}" if value else ""
