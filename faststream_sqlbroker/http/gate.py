"""Access control: authentication, roles, and limits on failures."""

import logging
from collections.abc import Sequence
from math import inf
from time import monotonic

from starlette.requests import HTTPConnection, Request

from faststream_sqlbroker.core.channels import RegisteredEndpoint
from faststream_sqlbroker.core.text import replace_invisible
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.flow.tasks.queue_jobs import RemoteConsumer
from faststream_sqlbroker.http.basic_auth import WRONG_PASSWORD, parse_credentials
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.lockout import (
    FailureCounter,
    TokenLookup,
    VerifiedSecrets,
    are_random,
    compare_tokens,
)
from faststream_sqlbroker.http.proxies import Network, find_client_address
from faststream_sqlbroker.http.responses import BodyLimits, Problem, read_form
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.users import (
    MAX_NAME,
    Authentication,
    Role,
    User,
    find_user,
    parse_role,
)

ADDRESS_FACTOR = 10
"""Failures of an address per `max_failures`, because a company's users may share an address.

It also limits guesses at a user during a lockout, after which the right password is refused as
well: without this limit an attacker could try as many passwords as the server can compare.
"""
RECENT_SECONDS = 3600.0
"""Seconds for which a verified password passes a lockout of its address."""
MAX_TOKEN_QUERIES = 600
"""Random tokens from locked-out addresses that a process may look up in the database per minute."""
CSRF_FIELD = "csrf"
"""Form field of the token."""
NO_CREDENTIALS = (
    "the request has no credentials: send a name and a password by HTTP Basic, or authenticate in "
    "another way that this server accepts"
)
WRONG_CREDENTIALS = "wrong name or password: send others, or ask an administrator for them"
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="sqlbroker", charset="UTF-8"'}


class AccessControl:
    """Authenticates and authorises requests, and refuses cross-site writes."""

    def __init__(
        self,
        authenticators: Sequence[Authentication],
        csrf: Csrf,
        service: Service,
        *,
        max_failures: int,
        proxies: Sequence[Network],
    ) -> None:
        """Create the counters of failures, and the memories of verified secrets.

        Passwords are counted by address and name, and by address alone; tokens by address.
        """
        self._authenticators = authenticators
        self._csrf = csrf
        self._service = service
        self._proxies = proxies
        self._name_failures = FailureCounter(max_failures, monotonic)
        self._address_failures = FailureCounter(max_failures * ADDRESS_FACTOR, monotonic)
        self._lockout_guesses = FailureCounter(max_failures * ADDRESS_FACTOR, monotonic)
        self._verified_passwords = VerifiedSecrets(RECENT_SECONDS, monotonic)
        self._token_failures = FailureCounter(max_failures, monotonic)
        self._token_queries = FailureCounter(MAX_TOKEN_QUERIES, monotonic)
        self._verified_tokens = VerifiedSecrets(inf, monotonic)

    async def authorize(self, request: Request, role: Role) -> User:
        """Return the authenticated user, who has at least `role`.

        A write from a browser also needs the CSRF token, in a header: pages of other sites cannot
        know it.

        Raises:
            Problem: the user is unknown (401), lacks the role (403), or failed too often (429).
        """
        user = await self._authorize_user(request, role)
        self._csrf.check(request, request.method, user.name)
        return user

    async def authorize_form(
        self, request: Request, role: Role, limits: BodyLimits
    ) -> tuple[User, dict[str, str]]:
        """Return the user and the fields of a form that contains the CSRF token.

        For forms of pages without JavaScript, which cannot send the token in a header.

        Raises:
            Problem: `authorize` or `read_form` refused the request.
        """
        # Authenticate first: only known users may send a body.
        user = await self._authorize_user(request, role)
        fields = await read_form(request, limits)
        self._csrf.check(request, request.method, user.name, fields.pop(CSRF_FIELD, None))
        return user, fields

    async def _authorize_user(self, request: Request, role: Role) -> User:
        """Authenticate the request, and check the role; the caller checks the CSRF token.

        A request without HTTP Basic credentials is not a guess of a password. It skips the lockout,
        the refusal of an address after many failures, which must not affect users of proxies and
        sessions.

        Raises:
            Problem: the user is unknown (401), lacks the role (403), or failed too often (429).
        """
        login = parse_credentials(request)
        if login is None:
            user = await self._find_user(request)
            if user is None:
                raise Problem(401, NO_CREDENTIALS, _CHALLENGE)
        else:
            user = await self._log_in(request, *login)
        if not user.may(role):
            role_name = parse_role(user.role).name.lower()
            text = f"this request needs the role {role.name.lower()}, your role is {role_name}"
            raise Problem(403, f"{text}: ask an administrator")
        return user

    async def _log_in(self, request: Request, name: str, password: str) -> User:
        """Authenticate Basic credentials, and count a wrong password against the address.

        Failures are counted by address, and by address and name. Beyond the limit of a pair that
        name is refused from the address, beyond the address's own limit every name, until the
        minute is over.

        Raises:
            Problem: the password is wrong (401), or the address is locked out (429).
        """
        address = find_client_address(request, self._proxies)
        pair = (address, name[:MAX_NAME])
        self._check_login(*pair, password)
        user = await self._find_user(request)
        # Check again: concurrent guesses all pass the first check before one of them fails.
        self._check_login(*pair, password)
        # Another authenticator may accept the request although BasicAuth found a wrong password.
        is_wrong = user is None or request.scope.get(WRONG_PASSWORD, False)
        if is_wrong:
            self._verified_passwords.record(*pair, password, is_right=False)
            self._address_failures.add(address)
            self._name_failures.add(*pair)
            self._log_failure(address, name)
        if user is None:
            raise Problem(401, WRONG_CREDENTIALS, _CHALLENGE)
        # Another authenticator may have accepted another user.
        if user.name == name and not is_wrong:
            self._verified_passwords.record(*pair, password)
            # Record the name last, so that it is not dropped before the password: guesses are
            # counted by name.
            self._verified_passwords.record(*pair)
        return user

    def _check_login(self, address: str, name: str, password: str) -> None:
        """Refuse a locked-out address, unless this password was right from there recently.

        An address is locked out after too many failures within a minute, for one name or for all.
        The exception lets users work who share the address with an attacker. The password is still
        authenticated afterwards. Guesses at a name during a lockout are counted; beyond their limit
        the right password is refused as well, so that a lockout cannot be used to find it.

        Raises:
            Problem: the address has failed too often (429).
        """
        is_right = self._verified_passwords.has(address, name, password)
        if is_right and not self._lockout_guesses.is_exceeded(address, name):
            return
        try:
            self._address_failures.check(address)
            self._name_failures.check(address, name)
        except Problem:
            # Guesses at a name without a verified password are not counted: callers choose names.
            if self._verified_passwords.has(address, name):
                self._lockout_guesses.add(address, name)
            raise

    async def _find_user(self, request: Request) -> User | None:
        """Return the user, or None if no authenticator knows the request.

        Raises:
            Problem: an authenticator of the application has a defect, which is logged (500).
        """
        try:
            return await find_user(self._authenticators, request)
        except SetupError as error:
            # The application's function has a defect, and the caller is not authenticated yet.
            self.log_warning(f"HTTP: request refused, authentication is misconfigured: {error}")
            raise Problem(500, "internal server error: see the server's log") from None

    async def find_by_tokens(
        self, connection: HTTPConnection, name: str, tokens: Sequence[str], lookup: TokenLookup
    ) -> list[RegisteredEndpoint | None] | None:
        """Return the result of `lookup` if all tokens match, or None if a token is wrong.

        `lookup` reads the stored hashes; `name` says whose tokens they are. An address that has
        sent too many wrong tokens is refused. Right tokens still pass, because a client may share
        the address with an attacker: tokens that were right for `name` before, and random tokens,
        which cannot be guessed.

        Raises:
            Problem: the address has sent too many wrong tokens (429).
            StoreError: the database cannot be queried.
        """
        address = find_client_address(connection, self._proxies)
        # A problem here is only raised if the tokens turn out to be wrong.
        lockout = (
            None
            if self._verified_tokens.has(name, *tokens)
            else self._check_lockout(address, tokens)
        )
        registered = await lookup()
        is_right = compare_tokens(tokens, registered)
        if lockout is not None and not is_right:
            raise lockout
        if not (self._verified_tokens.has(name, *tokens) or (is_right and are_random(tokens))):
            # Check again: concurrent guesses all pass the first check before one of them fails.
            self._token_failures.check(address)
        self._verified_tokens.record(name, *tokens, is_right=is_right)
        if is_right:
            return registered
        self._token_failures.add(address)
        self._log_failure(address, name)
        return None

    def _check_lockout(self, address: str, tokens: Sequence[str]) -> Problem | None:
        """Return the problem of a locked-out address that may still query the database, or None.

        Random tokens justify a query, because they cannot be guessed; their number per minute is
        limited. The caller raises the problem if such a token is wrong.

        Raises:
            Problem: the address is locked out, and its tokens do not justify a query.
        """
        try:
            self._token_failures.check(address)
        except Problem as problem:
            if not are_random(tokens) or self._token_queries.is_exceeded():
                raise
            # Count before the query, so that concurrent queries are limited as well.
            self._token_queries.add()
            return problem
        return None

    async def create_configured(self, jobs: PullJobs | RemoteConsumer, kind: str) -> None:
        """Create the channels or tokens that are configured for `jobs`.

        Called by each request, because the database may not be reachable before; later calls have
        no effect.

        Raises:
            Problem: they cannot be created (503).
        """
        try:
            await jobs.setup()
        except SetupError as error:
            # The message may name a worker, and the caller is not authenticated yet.
            self.log_warning(f"HTTP: request refused, cannot create the configured {kind}: {error}")
            raise Problem(
                503, f"cannot create the configured {kind}: see the server's log"
            ) from None

    def _log_failure(self, address: str, name: str) -> None:
        """Log a failed authentication; the name and the address come from the caller."""
        display_name = replace_invisible(name[:MAX_NAME])
        self.log_warning(
            f"HTTP: wrong password or token for {display_name!r} from {replace_invisible(address)}"
        )

    def log_warning(self, text: str) -> None:
        """Log a warning."""
        self._service.log(logging.WARNING, text)

    def create_csrf_token(self, user: User) -> str:
        """Return the CSRF token for writes of `user`."""
        return self._csrf.create_token(user.name)
