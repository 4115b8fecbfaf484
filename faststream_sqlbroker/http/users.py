"""Users, their roles, and the ways to find out who sent a request."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

MAX_NAME = 100
"""Characters of a user's name: it is written to the audit."""


class Role(IntEnum):
    """What a user may do; each role may do what the one before it may."""

    VIEWER = 1
    """See what there is."""
    OPERATOR = 2
    """Change messages and queues."""
    ADMIN = 3
    """Make channels, consumers and their tokens."""


def role_of(value: "Role | str") -> Role:
    """The role that is given, or named in any case.

    Raises:
        SetupError: there is no such role.
    """
    if isinstance(value, Role):
        return value
    if isinstance(value, str) and value.upper() in Role.__members__:
        return Role[value.upper()]
    raise SetupError(f"a role is viewer, operator or admin, got {short(value)}")


@dataclass(frozen=True, slots=True)
class User:
    """Who was authenticated.

    Args:
        name: Written to the audit with what the user does; 1 to 100 characters.
        role: A `Role`, or its name.

    Raises:
        SetupError: the name is not text of that length, or there is no such role.
    """

    name: str
    role: Role | str

    def __post_init__(self) -> None:
        """Check both."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise SetupError(
                f"the name of a user is text of 1 to {MAX_NAME} characters, got {short(self.name)}"
            )
        object.__setattr__(self, "role", role_of(self.role))

    def may(self, role: Role) -> bool:
        """Whether the user has `role`, or one above it."""
        return role_of(self.role) >= role


Authentication = Callable[[HTTPConnection], User | Awaitable[User | None] | None]
"""Returns the user who sent a request, or None. Raises Problem if it must not be answered."""


async def find_user(ways: Sequence[Authentication], connection: HTTPConnection) -> User | None:
    """Return the user whom the first of `ways` knows.

    Raises:
        SetupError: one of them returned something else.
    """
    for authenticate in ways:
        user: Any = authenticate(connection)
        if isinstance(user, Awaitable):
            user = await user
        if user is not None and not isinstance(user, User):
            # Only the type is shown: the value may hold a secret.
            kind = type(user).__name__
            raise SetupError(f"auth must return a User or None, it returned a {kind}")
        if user is not None:
            return user
    return None
