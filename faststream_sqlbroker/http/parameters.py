"""What paths, queries and forms say, checked."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from faststream_sqlbroker.core.channels import Registered
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.users import Role, User

LARGEST_ID = 2**63 - 1
"""Of a message."""
UNKNOWN_HASH = "0" * 64
"""What a token of something that does not exist is compared with."""
Guard = Callable[
    [Role, Callable[[Request, User], Awaitable[Response]]],
    Callable[[Request], Awaitable[Response]],
]
"""Makes an endpoint that only users with the role reach."""


def hash_of(found: Registered | None) -> str:
    """The hash that a token is compared with, also that of what does not exist."""
    return UNKNOWN_HASH if found is None else found.token_hash


def row_id(request: Request, name: str) -> int:
    """The id in the part `name` of the path.

    Raises:
        Problem: no message can have it (404).
    """
    text = request.path_params[name]
    # Other forms of the same number would be other names of one message.
    if text.isascii() and text.isdecimal() and str(int(text[:20])) == text:
        number = int(text)
        if number <= LARGEST_ID:
            return number
    raise Problem(404, f"there is no {name} {short(text)}: its id is a number, as it was answered")


def whole(text: str, name: str) -> int:
    """A whole number.

    Raises:
        Problem: it is something else, or has more digits than any that is asked for (400).
    """
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal():
        raise Problem(400, f"{name} must be a whole number, got {short(text)}")
    if len(digits) > len(str(LARGEST_ID)):
        most = len(str(LARGEST_ID))
        raise Problem(
            400, f"{name} must be a whole number of up to {most} digits, got {short(text)}"
        )
    return int(text)


def flag(fields: Mapping[str, str], name: str) -> bool:
    """A field that is true or false, and false if it is missing.

    Raises:
        Problem: it is something else (400).
    """
    value = fields.get(name, "false")
    if value not in {"true", "false"}:
        raise Problem(400, f"{name} must be true or false, got {short(value)}")
    return value == "true"
