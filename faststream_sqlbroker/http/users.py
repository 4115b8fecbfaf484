"""Who asks, and what they may do: users, their roles, and how they are known."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

LONGEST_USER = 100
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
        if not isinstance(self.name, str) or not 0 < len(self.name) <= LONGEST_USER:
            raise SetupError(
                f"the name of a user is text of 1 to {LONGEST_USER} characters, got "
                f"{short(self.name)}"
            )
        object.__setattr__(self, "role", role_of(self.role))

    def may(self, role: Role) -> bool:
        """Whether the user has `role`, or one above it."""
        return role_of(self.role) >= role


class Authentication(Protocol):
    """Finds out who asks."""

    async def user(self, connection: HTTPConnection) -> User | None:
        """Who it is; None: not known by this way.

        Raises:
            Problem: the request must not be answered.
        """


class ByCallable:
    """An application's own function."""

    def __init__(
        self, find: Callable[[HTTPConnection], User | Awaitable[User | None] | None]
    ) -> None:
        """`find` gets the request and returns a `User`, or None."""
        self._find = find

    async def user(self, connection: HTTPConnection) -> User | None:
        """What the function says.

        Raises:
            SetupError: it returned something else.
        """
        found: Any = self._find(connection)
        if isinstance(found, Awaitable):
            found = await found
        if found is not None and not isinstance(found, User):
            # Only the type is shown: the value may hold what a user is known by.
            kind = type(found).__name__
            raise SetupError(f"auth must return a User or None, it returned a {kind}")
        return found


class FirstOf:
    """Several ways: the first one that knows the user."""

    def __init__(self, ways: "list[Authentication]") -> None:
        """In this order."""
        self._ways = ways

    async def user(self, connection: HTTPConnection) -> User | None:
        """None: none of them knows who it is."""
        for way in self._ways:
            found = await way.user(connection)
            if found is not None:
                return found
        return None
