"""Mounting of the application below a path."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class PathPrefix(str):
    """A path that equals all paths below it.

    AsgiFastStream has no mounts: it compares each path of its `asgi_routes` with the request's
    path. Python asks the subclass first whether two strings are equal.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is this path or below."""
        if not isinstance(other, str):
            return NotImplemented
        return str.__eq__(self, other) or other.startswith(f"{self!s}/")

    def __ne__(self, other: object) -> bool:
        """Return True if `other` is not at or below this path."""
        return not self == other

    __hash__ = str.__hash__


def parse_prefix(prefix: str) -> str:
    """Return `prefix` without a trailing slash.

    Raises:
        SetupError: the prefix does not begin with a slash, or has nothing else.
    """
    if not isinstance(prefix, str) or not prefix.startswith("/") or not prefix.strip("/"):
        raise SetupError(f"prefix must be a path such as /broker, got {format_value(prefix)}")
    return prefix.rstrip("/")


def mount_below(prefix: str, app: App) -> App:
    """Return `app` mounted at `prefix`.

    The root path tells the application which part of the path is its own prefix.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "") + prefix
        mounted_scope = {**scope, "root_path": root}
        if mounted_scope.get("path") == root:
            # People type this path; a redirect would go to an arbitrary Host.
            mounted_scope["path"] = f"{root}/"
        await app(mounted_scope, receive, send)

    return serve
