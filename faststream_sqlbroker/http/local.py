"""Access without authentication, for local users only (`sqlbroker serve --insecure`)."""

from ipaddress import ip_address

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.http.proxies import get_peer, parse_host_name
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.users import Role, User

PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-forwarded-port",
    "x-real-ip",
    "cf-connecting-ip",
    "true-client-ip",
)
"""Headers that a proxy adds; with one, a request may come from anywhere."""


class LocalOnly:
    """Admits local requests as an administrator."""

    async def user(self, connection: HTTPConnection) -> User | None:
        """Return the local administrator."""
        check_local(connection)
        return User("local", Role.ADMIN)


def check_local(connection: HTTPConnection) -> None:
    """Refuse requests that may come from another machine.

    Host is checked against DNS rebinding: a page of another site can resolve its own name to
    127.0.0.1, and its requests then have that name in Host. An IP address cannot be redirected.

    Raises:
        Problem: the peer or Host is not local, or a proxy is in between (403).
    """
    names = connection.headers.getlist("host")
    if len(names) != 1 or not is_loopback(parse_host_name(names[0]).strip("[]")):
        received = format_value(", ".join(names))
        raise Problem(403, f"without authentication, Host must be localhost, got {received}")
    if name := next((name for name in PROXY_HEADERS if name in connection.headers), None):
        text = f"without authentication, proxies are refused, got the header {name}"
        raise Problem(403, f"{text}: connect directly, or configure authentication")
    if not is_loopback(get_peer(connection)):
        text = (
            "without authentication, only this machine may connect, got "
            f"{format_value(get_peer(connection))}"
        )
        raise Problem(403, f"{text}: configure authentication")


def is_loopback(address: str) -> bool:
    """Return True if `address` is only reachable from this machine."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False
