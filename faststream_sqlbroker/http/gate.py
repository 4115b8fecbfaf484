"""Who may pass: users with a role, and not too many failures."""

import logging
from collections.abc import Sequence
from math import inf
from time import monotonic

from starlette.requests import HTTPConnection, Request

from faststream_sqlbroker.core.channels import Registered
from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.flow.tasks.queue_jobs import QueueJobs
from faststream_sqlbroker.http.answers import BodyLimits, Problem, read_form
from faststream_sqlbroker.http.basic import WRONG_PASSWORD, credentials
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.lockout import Failures, Look, RightSecrets, are_random, fit
from faststream_sqlbroker.http.proxies import Network, client_address
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.users import (
    MAX_NAME,
    Authentication,
    Role,
    User,
    find_user,
    role_of,
)

FACTOR = 10
"""How many times `max_failures` an address may fail, as a company's people may share it; and how
many guesses at a user it has during a lock-out, until the right password is refused, too: without
a limit a guesser could try as many passwords as the server can compare.
"""
RECENT = 3600.0
"""Seconds for which a right password passes a lock-out of its address."""
LOOKS = 600
"""Random tokens of locked-out addresses that a process compares with the database in a minute."""
CSRF_FIELD = "csrf"
"""The field of a form that has the token."""
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
        ways: Sequence[Authentication],
        csrf: Csrf,
        service: Service,
        *,
        max_failures: int,
        proxies: Sequence[Network],
    ) -> None:
        self._ways = ways
        self._csrf = csrf
        self._service = service
        self._proxies = proxies
        self._of_names = Failures(max_failures, monotonic)
        self._of_addresses = Failures(max_failures * FACTOR, monotonic)
        self._guesses = Failures(max_failures * FACTOR, monotonic)
        self._passwords = RightSecrets(RECENT, monotonic)
        self._of_tokens = Failures(max_failures, monotonic)
        self._looks = Failures(LOOKS, monotonic)
        self._tokens = RightSecrets(inf, monotonic)

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
        if given is None:
            # No guess, so guesses of others must not keep out users of proxies and sessions.
            user = await self._find_user(request)
            if user is None:
                raise Problem(401, NO_USER, _CHALLENGE)
        else:
            user = await self._logged_in(request, *given)
        if not user.may(role):
            has = role_of(user.role).name.lower()
            text = f"this needs the role {role.name.lower()}, and you have the role {has}"
            raise Problem(403, f"{text}: ask an administrator")
        return user

    async def _logged_in(self, request: Request, name: str, password: str) -> User:
        address = client_address(request, self._proxies)
        pair = (address, name[:MAX_NAME])
        self._check_login(*pair, password)
        user = await self._find_user(request)
        # Again: many guesses at once would all have passed before the first has failed.
        self._check_login(*pair, password)
        is_wrong = user is None or request.scope.get(WRONG_PASSWORD, False)
        if is_wrong:
            self._passwords.note(*pair, password, right=False)
            self._of_addresses.add(address)
            self._of_names.add(*pair)
            self._log_failure(address, name)
        if user is None:
            raise Problem(401, WRONG, _CHALLENGE)
        # Another way than the password may have let in another user.
        if user.name == name and not is_wrong:
            self._passwords.note(*pair, password)
            # Last, so it is not forgotten before the password: guesses are counted by it.
            self._passwords.note(*pair)
        return user

    def _check_login(self, address: str, name: str, password: str) -> None:
        """Refuse an address that has failed too often, but for passwords that were right lately.

        Authentication asks again whether they still are.
        """
        is_right = self._passwords.has(address, name, password)
        if is_right and not self._guesses.is_full(address, name):
            return
        try:
            self._of_addresses.check(address)
            self._of_names.check(address, name)
        except Problem:
            # Guesses at a name that has no right password are not counted: callers choose names.
            if self._passwords.has(address, name):
                self._guesses.add(address, name)
            raise

    async def _find_user(self, request: Request) -> User | None:
        try:
            return await find_user(self._ways, request)
        except SetupError as error:
            # The application's function is wrong, and the caller is not known yet.
            self.log(f"HTTP: a user cannot be authenticated: {error}")
            raise Problem(500, "an error of the server: see its log") from None

    async def let_in(
        self, connection: HTTPConnection, name: str, tokens: Sequence[str], look: Look
    ) -> list[Registered | None] | None:
        """What `look` has got, if the tokens are right for it; None: one of them is wrong.

        An address that has sent too many wrong tokens, whatever they were for, is refused. Right
        tokens pass: their client may share the address with one that guesses. They are those that
        were right for `name` before, and random ones, which cannot be guessed.

        Raises:
            Problem: the address has sent too many wrong ones (429).
            StoreError: the database could not be asked.
        """
        address = client_address(connection, self._proxies)
        lockout = None if self._tokens.has(name, *tokens) else self._lockout(address, tokens)
        found = await look()
        right = fit(tokens, found)
        if lockout is not None and not right:
            raise lockout
        if not (self._tokens.has(name, *tokens) or (right and are_random(tokens))):
            # Again: many guesses at once would all have passed before the first has failed.
            self._of_tokens.check(address)
        self._tokens.note(name, *tokens, right=right)
        if right:
            return found
        self._of_tokens.add(address)
        self._log_failure(address, name)
        return None

    def _lockout(self, address: str, tokens: Sequence[str]) -> Problem | None:
        """What an address that has sent too many wrong tokens is answered, unless these are right.

        Raises:
            Problem: it is, and they are not worth a look at the database.
        """
        try:
            self._of_tokens.check(address)
        except Problem as problem:
            if not are_random(tokens) or self._looks.is_full():
                raise
            # Before the look at the database: many at once are limited, too.
            self._looks.add()
            return problem
        return None

    async def begin(self, jobs: PullJobs | QueueJobs, what: str) -> None:
        """Make `what` the configuration of `jobs` names.

        Raises:
            Problem: it cannot be made (503).
        """
        try:
            await jobs.begin()
        except SetupError as error:
            # Its text may name a worker, and the caller is not known yet.
            self.log(f"HTTP: the {what} of the configuration cannot be made: {error}")
            raise Problem(503, f"the {what} cannot be made: see the server's log") from None

    def _log_failure(self, address: str, name: str) -> None:
        shown = visible(name[:MAX_NAME])
        self.log(f"HTTP: a wrong password or token for {shown!r} from {visible(address)}")

    def log(self, text: str) -> None:
        """Warn of something."""
        self._service.log(logging.WARNING, text)

    def token(self, user: User) -> str:
        """What a page of this application sends with each write of `user`."""
        return self._csrf.token(user.name)
