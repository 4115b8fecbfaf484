"""How the application is mounted below a path."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Below(str):
    """A path that equals all paths below it.

    AsgiFastStream has no mounts: it compares each path of its `asgi_routes` with that of the
    request. Python asks the subclass first whether the two are equal.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether `other` is this path, or one below it."""
        if not isinstance(other, str):
            return NotImplemented
        return str.__eq__(self, other) or other.startswith(f"{self!s}/")

    def __ne__(self, other: object) -> bool:
        """The contrary."""
        return not self == other

    __hash__ = str.__hash__


def checked_prefix(prefix: str) -> str:
    """`prefix` without a slash at its end.

    Raises:
        SetupError: it does not begin with a slash, or is nothing else.
    """
    if not isinstance(prefix, str) or not prefix.startswith("/") or not prefix.strip("/"):
        raise SetupError(f"a path to mount at begins with a slash, as /broker, got {short(prefix)}")
    return prefix.rstrip("/")


def below(prefix: str, app: App) -> App:
    """`app`, to which `prefix` is the root."""

    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "") + prefix
        inner = {**scope, "root_path": root}
        if inner.get("path") == root:
            # What people type; a redirect would lead to whatever Host says.
            inner["path"] = f"{root}/"
        await app(inner, receive, send)

    return mounted
