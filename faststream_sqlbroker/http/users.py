"""Users, their roles, and the authentication of requests."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

MAX_NAME = 100
"""Characters of a user's name, which is written to the audit."""


class Role(IntEnum):
    """Permissions of a user; each role includes the previous one."""

    VIEWER = 1
    """View everything."""
    OPERATOR = 2
    """Change messages and queues."""
    ADMIN = 3
    """Create channels, consumers and their tokens."""


def parse_role(value: "Role | str") -> Role:
    """Return a role, or parse a role's name in any case.

    Raises:
        SetupError: there is no such role.
    """
    if isinstance(value, Role):
        return value
    if isinstance(value, str) and value.upper() in Role.__members__:
        return Role[value.upper()]
    raise SetupError(f"a role must be viewer, operator or admin, got {format_value(value)}")


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user.

    Args:
        name: Written to the audit with what the user does; 1 to 100 characters.
        role: A `Role`, or its name.

    Raises:
        SetupError: the name is not text of that length, or there is no such role.
    """

    name: str
    role: Role | str

    def __post_init__(self) -> None:
        """Validate both fields."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME:
            raise SetupError(
                f"the name of a user must be text of 1 to {MAX_NAME} characters, got "
                f"{format_value(self.name)}"
            )
        object.__setattr__(self, "role", parse_role(self.role))

    def may(self, role: Role) -> bool:
        """Return True if the user has at least `role`."""
        return parse_role(self.role) >= role


Authentication = Callable[[HTTPConnection], User | Awaitable[User | None] | None]
"""Returns the user of a request, or None; raises `Problem` to refuse the request."""


async def find_user(
    authenticators: Sequence[Authentication], connection: HTTPConnection
) -> User | None:
    """Return the user from the first authenticator that recognises the request.

    An authenticator may be a function of the application, so its result is checked.

    Raises:
        SetupError: a function returned something else.
    """
    for authenticate in authenticators:
        user: Any = authenticate(connection)
        if isinstance(user, Awaitable):
            user = await user
        if user is not None and not isinstance(user, User):
            # Show only the type, because the value may contain a secret.
            kind = type(user).__name__
            raise SetupError(f"auth must return a User or None, got a {kind}")
        if user is not None:
            return user
    return None
