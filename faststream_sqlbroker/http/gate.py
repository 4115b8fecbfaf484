"""Who may pass: users with a role, and not too many failures."""

import logging
import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_network
from time import monotonic

from starlette.requests import HTTPConnection, Request

from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.answers import BodyLimits, Problem, read_form
from faststream_sqlbroker.http.basic import credentials
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.lockout import Failures, LockedOut, Look, RightTokens, are_random
from faststream_sqlbroker.http.proxies import Network, is_of, parsed_address, peer
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.users import Authentication, Role, User, role_of

NAMES_OF_ADDRESS = 10
"""How many times as many failures an address may have as a name that it tries: a company's people
may share one."""
LONGEST_NAME = 80
"""Characters of a name by which failures are counted and told: callers choose them."""
OF_ONE_HOUSE = 64
"""Bits of an IPv6 address that its owner cannot choose freely."""
CSRF_FIELD = "csrf"
"""The field of a form that has the token."""
_WITH_PORT = re.compile(r"(?:(?P<four>[0-9.]+)|\[(?P<six>[0-9A-Fa-f:.]+)\])(?::[0-9]+)?", re.ASCII)
NO_USER = (
    "the request does not say who you are: send a name and a password by HTTP Basic, or come by "
    "the way by which this server knows its users"
)
WRONG = "no user has this name and this password: send others, or ask an administrator for them"
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="sqlbroker", charset="UTF-8"'}


class Gate:
    """Authenticates, then authorises, then asks whether another site's page is behind it."""

    def __init__(
        self,
        auth: Authentication,
        csrf: Csrf,
        service: Service,
        *,
        max_failures: int,
        proxies: list[Network],
    ) -> None:
        self._auth = auth
        self._csrf = csrf
        self._service = service
        self._proxies = proxies
        self._of_names = Failures(max_failures, monotonic)
        self._of_addresses = Failures(max_failures * NAMES_OF_ADDRESS, monotonic)
        self._of_tokens = Failures(max_failures, monotonic)
        self._right_tokens = RightTokens()
        self._locked_out = LockedOut(monotonic)

    async def enter(self, request: Request, role: Role) -> User:
        """The user, who has `role` at least.

        Raises:
            Problem: not known (401), not allowed (403), or failed too often (429).
        """
        user = await self._allowed(request, role)
        self._csrf.check(request, request.method, user.name)
        return user

    async def enter_form(
        self, request: Request, role: Role, limits: BodyLimits
    ) -> tuple[User, dict[str, str]]:
        """As `enter`, for a form that has the CSRF token among its fields; and the others.

        Raises:
            Problem: as `enter` and `read_form`.
        """
        # Only whom we know may let us read a body.
        user = await self._allowed(request, role)
        fields = await read_form(request, limits)
        self._csrf.check(request, request.method, user.name, fields.pop(CSRF_FIELD, None))
        return user, fields

    async def _allowed(self, request: Request, role: Role) -> User:
        given = credentials(request)
        name = "" if given is None else given[0]
        with_secret = given is not None
        self._check(request, name)
        user = await self._user(request)
        # Again: many guesses at once would all have passed before the first has failed.
        self._check(request, name)
        if user is None:
            if with_secret:
                self._failed(request, name)
            raise Problem(401, WRONG if with_secret else NO_USER, _CHALLENGE)
        if not user.may(role):
            has = role_of(user.role).name.lower()
            text = f"this needs the role {role.name.lower()}, and you have the role {has}"
            raise Problem(403, f"{text}: ask an administrator")
        return user

    async def _user(self, request: Request) -> User | None:
        try:
            return await self._auth.user(request)
        except SetupError as error:
            # The application's function is wrong, and the caller is not known yet.
            self.log(f"HTTP: a user cannot be authenticated: {error}")
            raise Problem(500, "an error of the server: see its log") from None

    async def check_tokens(
        self, connection: HTTPConnection, name: str, tokens: Sequence[str], look: Look
    ) -> None:
        """Refuse an address that has sent too many wrong tokens, whatever queues they were for.

        Right tokens pass: their client may share the address with one that guesses. They are those
        that were right for `name` before, and random ones that fit the hashes which `look` gets.
        All are compared again by the caller.

        Raises:
            Problem: it has (429).
            StoreError: the database could not be asked.
        """
        if self._right_tokens.has(name, tokens):
            return
        try:
            self._of_tokens.check((self._address(connection),))
        except Problem:
            if not await self._locked_out.fits(name, tokens, look):
                raise

    def tokens_compared(
        self, connection: HTTPConnection, name: str, tokens: Sequence[str], *, right: bool
    ) -> None:
        """Remember right tokens; count wrong ones by their address alone, and tell the log.

        Raises:
            Problem: the address has sent too many wrong ones by now (429).
        """
        key = (self._address(connection),)
        if not (self._right_tokens.has(name, tokens) or (right and are_random(tokens))):
            # Again: many guesses at once would all have passed before the first has failed.
            self._of_tokens.check(key)
        if right:
            self._right_tokens.add(name, tokens)
            return
        self._right_tokens.forget(name, tokens)
        self._of_tokens.failed([key])
        self._tell_failure(connection, name)

    def _check(self, connection: HTTPConnection, name: str) -> None:
        address = self._address(connection)
        self._of_addresses.check((address,))
        self._of_names.check((address, name[:LONGEST_NAME]))

    def _failed(self, connection: HTTPConnection, name: str) -> None:
        address = self._address(connection)
        self._of_addresses.failed([(address,)])
        self._of_names.failed([(address, name[:LONGEST_NAME])])
        self._tell_failure(connection, name)

    def _tell_failure(self, connection: HTTPConnection, name: str) -> None:
        address = self._address(connection)
        shown = visible(name[:LONGEST_NAME])
        self.log(f"HTTP: a wrong password or token for {shown!r} from {visible(address)}")

    def log(self, text: str) -> None:
        """Warn of something."""
        self._service.log(logging.WARNING, text)

    def token(self, user: User) -> str:
        """What a page of this application sends with each write of `user`."""
        return self._csrf.token(user.name)

    def _address(self, connection: HTTPConnection) -> str:
        """Whose failures are counted together."""
        found = client_address(connection, self._proxies)
        parsed = parsed_address(found)
        if isinstance(parsed, IPv6Address):
            return str(ip_network((parsed, OF_ONE_HOUSE), strict=False))
        return found if parsed is None else str(parsed)


def client_address(connection: HTTPConnection, proxies: list[Network]) -> str:
    """The address of the client, as far as the listed proxies tell.

    Each proxy appends the address that it was asked from, so the last one that is no proxy's is
    true; what stands before it the client may have written.
    """
    found = peer(connection)
    if not is_of(found, proxies):
        return found
    listed = ",".join(connection.headers.getlist("x-forwarded-for"))
    for each in reversed([part.strip() for part in listed.split(",") if part.strip()]):
        found = without_port(each)
        if not is_of(found, proxies):
            break
    return found


def without_port(address: str) -> str:
    """`address` as some proxies write it, with the client's port, which differs each time."""
    found = _WITH_PORT.fullmatch(address)
    return address if found is None else found["four"] or found["six"]
