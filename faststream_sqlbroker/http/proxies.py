"""Users whom a proxy has authenticated, and the addresses of clients behind proxies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.users import MAX_NAME, Role, User

Network = IPv4Network | IPv6Network
OF_ONE_HOUSE = 64
"""Bits of an IPv6 address that its owner cannot choose freely."""


class ProxyAuth:
    """Trusts a header that a proxy sets, from listed addresses only.

    The proxy must remove that header from what clients send. The server must not replace the peer's
    address by X-Forwarded-For: run uvicorn with `--no-proxy-headers`.
    """

    def __init__(
        self,
        header: str,
        *,
        proxies: Iterable[str],
        roles: "Mapping[str, Role | str] | Callable[[str], Role | str | None]",
    ) -> None:
        """Trust `header` from these proxies.

        Args:
            header: Its name, such as "X-Forwarded-User".
            proxies: Their addresses or networks, such as "10.0.3.7" or "10.0.3.0/24".
            roles: The role of each user, or a function that returns it; a user without one is not
                let in.

        Raises:
            SetupError: the header or an address is not valid, or no address is given.
        """
        if not isinstance(header, str) or not header.replace("-", "").isalnum():
            raise SetupError(f"header must be the name of a header, got {short(header)}")
        self._header = header
        self._proxies = networks(proxies)
        self._role_of = roles if callable(roles) else roles.get
        if not self._proxies:
            raise SetupError("ProxyAuth needs the address of the proxy: proxies=['10.0.3.7']")

    async def user(self, connection: HTTPConnection) -> User | None:
        """Who it is by the header; None if another peer has sent it, or for a user without a role.

        Raises:
            Problem: the header is there twice (400), as if a client had added its own.
        """
        values = connection.headers.getlist(self._header)
        if not values or not is_of(peer(connection), self._proxies):
            return None
        if len(values) > 1:
            text = f"the header {self._header} must be there once, got it {len(values)} times"
            raise Problem(400, f"{text}: the proxy must remove what clients send")
        name = values[0].strip()
        role = self._role_of(name) if 0 < len(name) <= MAX_NAME else None
        return None if role is None else User(name, role)


def networks(addresses: Iterable[str]) -> list[Network]:
    """The networks of `addresses`.

    Raises:
        SetupError: one of them is no address and no network.
    """
    parsed: list[Network] = []
    for address in [addresses] if isinstance(addresses, str) else addresses:
        try:
            parsed.append(ip_network(address))
        except ValueError:
            raise SetupError(
                f"{short(address)} is no address and no network: give '10.0.3.7' or '10.0.3.0/24'"
            ) from None
    return parsed


def peer(connection: HTTPConnection) -> str:
    """The address that the connection comes from; "" where there is none, as of a Unix socket."""
    return "" if connection.client is None else connection.client.host


def is_of(address: str, known: Iterable[Network]) -> bool:
    """Whether `address` is in one of the networks."""
    parsed = parse_address(address)
    return parsed is not None and any(parsed in network for network in known)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address, also of `address:port`, or None.

    A socket of IPv6 shows a peer of IPv4 as ::ffff:192.0.2.1: this is 192.0.2.1.
    """
    for host in (text, host_name(text).strip("[]")):
        with suppress(ValueError):
            parsed = ip_address(host)
            return getattr(parsed, "ipv4_mapped", None) or parsed
    return None


def host_name(host: str) -> str:
    """The name in a Host header, in lower case, without its port."""
    name, colon, port = host.rpartition(":")
    named = name if colon and port.isdecimal() else host
    return named.lower()


def client_address(connection: HTTPConnection, proxies: Sequence[Network]) -> str:
    """Return the client's address as far as the listed proxies tell; of IPv6, its network.

    Each proxy appends the address that it was asked from, so the last one that is no proxy's is
    true; what stands before it the client may have written.
    """
    forwarded = ",".join(connection.headers.getlist("x-forwarded-for")).split(",")
    hops = [peer(connection), *(part.strip() for part in reversed(forwarded) if part.strip())]
    client = next((hop for hop in hops if not is_of(hop, proxies)), hops[-1])
    address = parse_address(client)
    if isinstance(address, IPv6Address):
        return str(ip_network((address, OF_ONE_HOUSE), strict=False))
    return client[:MAX_NAME] if address is None else str(address)
