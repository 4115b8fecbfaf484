"""Users authenticated by a proxy, and addresses of clients behind proxies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.users import MAX_NAME, Role, User

Network = IPv4Network | IPv6Network
IPV6_NETWORK_BITS = 64
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
        """Trust `header` from the proxies at `proxies`.

        Args:
            header: Its name, such as "X-Forwarded-User".
            proxies: Their addresses or networks, such as "10.0.3.7" or "10.0.3.0/24".
            roles: The role of each user, or a function that returns it; a user without one is not
                let in.

        Raises:
            SetupError: the header or an address is not valid, or no address is given.
        """
        if not isinstance(header, str) or not header.replace("-", "").isalnum():
            raise SetupError(f"header must be the name of a header, got {format_value(header)}")
        self._header = header
        self._proxies = parse_networks(proxies)
        self._role_of = roles if callable(roles) else roles.get
        if not self._proxies:
            raise SetupError("ProxyAuth needs the address of the proxy: proxies=['10.0.3.7']")

    async def user(self, connection: HTTPConnection) -> User | None:
        """Return the user in the header, or None from other peers and for users without a role.

        Raises:
            Problem: the header occurs twice (400), so a client may have added its own.
        """
        values = connection.headers.getlist(self._header)
        if not values or not is_in_networks(get_peer(connection), self._proxies):
            return None
        if len(values) > 1:
            text = f"the header {self._header} must occur once, got it {len(values)} times"
            raise Problem(400, f"{text}: make the proxy remove it from clients' requests")
        name = values[0].strip()
        role = self._role_of(name) if 0 < len(name) <= MAX_NAME else None
        return None if role is None else User(name, role)


def parse_networks(addresses: Iterable[str]) -> list[Network]:
    """Parse addresses and networks.

    Raises:
        SetupError: a value is neither an address nor a network.
    """
    parsed: list[Network] = []
    for address in [addresses] if isinstance(addresses, str) else addresses:
        try:
            parsed.append(ip_network(address))
        except ValueError:
            raise SetupError(
                f"{format_value(address)} is not an address or network: use '10.0.3.7' or "
                "'10.0.3.0/24'"
            ) from None
    return parsed


def get_peer(connection: HTTPConnection) -> str:
    """Return the address of the peer, or an empty string, for example on a Unix socket."""
    return "" if connection.client is None else connection.client.host


def is_in_networks(address: str, networks: Iterable[Network]) -> bool:
    """Return True if any of `networks` contains `address`."""
    parsed = parse_address(address)
    return parsed is not None and any(parsed in network for network in networks)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return the address, also of `address:port`, or None.

    An IPv6 socket shows an IPv4 peer as ::ffff:192.0.2.1, which is returned as 192.0.2.1.
    """
    for host in (text, parse_host_name(text).strip("[]")):
        with suppress(ValueError):
            parsed = ip_address(host)
            return getattr(parsed, "ipv4_mapped", None) or parsed
    return None


def parse_host_name(host: str) -> str:
    """Return the name in a Host header in lower case, without the port."""
    name, colon, port = host.rpartition(":")
    host_part = name if colon and port.isdecimal() else host
    return host_part.lower()


def find_client_address(connection: HTTPConnection, proxies: Sequence[Network]) -> str:
    """Return the client's address as reported by the listed proxies; for IPv6, the network.

    Each proxy appends the address of its client, so the last address that is not a proxy is
    reliable; the client may have written earlier addresses.
    """
    forwarded = ",".join(connection.headers.getlist("x-forwarded-for")).split(",")
    hops = [get_peer(connection), *(part.strip() for part in reversed(forwarded) if part.strip())]
    client = next((hop for hop in hops if not is_in_networks(hop, proxies)), hops[-1])
    address = parse_address(client)
    if isinstance(address, IPv6Address):
        return str(ip_network((address, IPV6_NETWORK_BITS), strict=False))
    return client[:MAX_NAME] if address is None else str(address)
