"""Users whom a proxy has authenticated, and the addresses of clients behind it."""

from collections.abc import Callable, Iterable, Mapping
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
from faststream_sqlbroker.http.users import LONGEST_USER, Role, User

Network = IPv4Network | IPv6Network


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
        self._roles = roles
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
        if not 0 < len(name) <= LONGEST_USER:
            return None
        role = self._roles(name) if callable(self._roles) else self._roles.get(name)
        return None if role is None else User(name, role)


def networks(addresses: Iterable[str]) -> list[Network]:
    """The networks of `addresses`.

    Raises:
        SetupError: one of them is no address and no network.
    """
    found: list[Network] = []
    for each in [addresses] if isinstance(addresses, str) else addresses:
        try:
            found.append(ip_network(each))
        except ValueError:
            raise SetupError(
                f"{short(each)} is no address and no network: give '10.0.3.7' or '10.0.3.0/24'"
            ) from None
    return found


def peer(connection: HTTPConnection) -> str:
    """The address that the connection comes from; "" where there is none, as of a Unix socket."""
    return "" if connection.client is None else connection.client.host


def is_of(address: str, known: Iterable[Network]) -> bool:
    """Whether `address` is in one of the networks."""
    parsed = parsed_address(address)
    return parsed is not None and any(parsed in network for network in known)


def parsed_address(address: str) -> IPv4Address | IPv6Address | None:
    """None: it is no address. A socket of IPv6 shows a peer of IPv4 as ::ffff:192.0.2.1."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return mapped or parsed
