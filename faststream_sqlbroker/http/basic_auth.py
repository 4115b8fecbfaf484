"""HTTP Basic authentication. Passwords are stored as scrypt hashes with their parameters."""

import asyncio
import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.lockout import VerifiedSecrets
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.users import Role, User

COST = 2**14
"""Scrypt's N: with `BLOCK` one hash takes 16 MiB and some 50 ms."""
MAX_COST = 2**20
"""Maximum N of a stored hash: a larger N would take more than 1 GiB."""
BLOCK = 8
"""Scrypt's r."""
HASH_LENGTH = 32
"""Bytes of a hash."""
MIN_PASSWORD = 8
"""Minimum characters of a password."""
VERIFIED_SECONDS = 60.0
"""Seconds for which a verified password is not hashed again."""
MAX_HASHES = 2
"""Concurrent hashes: each takes 16 MiB and a processor, and anyone can cause one."""
MAX_WAITING = 32
"""Requests that may wait for a hash; further requests are refused at once."""


WRONG_PASSWORD = "sqlbroker.wrong_password"  # noqa: S105 - a key
"""Key in the scope of a request: True if the password was wrong for a user of `BasicAuth`."""


@dataclass(frozen=True, slots=True)
class StoredPassword:
    """A parsed hash, with the parameters of scrypt."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes = bytes(HASH_LENGTH)

    def hash(self, password: str) -> bytes:
        """Return the hash of `password`; takes some 50 ms of a processor."""
        return hashlib.scrypt(
            password.encode(errors="surrogatepass"),
            salt=self.salt,
            n=self.cost,
            r=self.block,
            p=self.parallel,
            # By default OpenSSL refuses hashes that need more than 32 MiB.
            maxmem=256 * self.cost * self.block,
            dklen=HASH_LENGTH,
        )

    def matches(self, password: str) -> bool:
        """Return True if this is the hash of `password`, in the time of `hash`."""
        return hmac.compare_digest(self.hash(password), self.digest)


def hash_password(password: str) -> str:
    """Return the hash to store for `password`.

    Raises:
        SetupError: the password has fewer than 8 characters.
    """
    if len(password) < MIN_PASSWORD:
        raise SetupError(f"a password needs {MIN_PASSWORD} characters or more, got {len(password)}")
    stored = StoredPassword(COST, BLOCK, 1, secrets.token_bytes(16))
    salt, digest = (b64encode(part).decode() for part in (stored.salt, stored.hash(password)))
    return f"scrypt${stored.cost}${stored.block}${stored.parallel}${salt}${digest}"


def parse_password_hash(text: str) -> StoredPassword:
    """Parse a result of `hash_password`.

    Raises:
        SetupError: the text has another form; it is not quoted, because it may be a password.
    """
    try:
        kind, *numbers, salt, digest = text.split("$")
        cost, block, parallel = (int(number) for number in numbers)
        parts = [b64decode(part, validate=True) for part in (salt, digest)]
        is_power = cost.bit_count() == 1 < cost <= MAX_COST
        is_small = 1 <= block <= BLOCK and 1 <= parallel <= BLOCK
        if kind == "scrypt" and is_power and is_small and len(parts[1]) == HASH_LENGTH:
            return StoredPassword(cost, block, parallel, *parts)
    except (AttributeError, ValueError):
        pass
    form = "scrypt$N$r$p$salt$hash"
    raise SetupError(
        f"password_hash must have the form {form}: create it with `sqlbroker hash-password`"
    )


@dataclass(frozen=True, slots=True)
class Login:
    """A user with a password.

    Args:
        name: As the user gives it; without a colon.
        role: viewer, operator or admin.
        password_hash: What `sqlbroker hash-password` or `hash_password` made of the password.

    Raises:
        SetupError: one of them is not valid.
    """

    name: str
    role: Role | str
    password_hash: str

    def __post_init__(self) -> None:
        """Validate the fields."""
        if ":" in User(self.name, self.role).name:
            raise SetupError(
                f"the name of a Login must not contain a colon, got {format_value(self.name)}"
            )
        parse_password_hash(self.password_hash)

    def __repr__(self) -> str:
        return f"Login({self.name!r}, {self.role!r})"


class BasicAuth:
    """Authenticates users by name and password.

    Verified passwords are remembered for a minute as a keyed hash, so that not every request
    needs an scrypt hash.
    """

    def __init__(self, logins: Iterable[Login]) -> None:
        """Accept the users of `logins`.

        Raises:
            SetupError: there are no logins, or two with the same name.
        """
        self._users: dict[str, tuple[User, StoredPassword]] = {}
        for login in logins:
            if login.name in self._users:
                raise SetupError(f"two logins have the name {format_value(login.name)}")
            user = User(login.name, login.role)
            self._users[login.name] = (user, parse_password_hash(login.password_hash))
        if not self._users:
            raise SetupError("BasicAuth needs at least one Login")
        self._decoys = [stored for _, stored in self._users.values()]
        self._verified = VerifiedSecrets(VERIFIED_SECONDS, monotonic)
        self._hash_slots = asyncio.Semaphore(MAX_HASHES)
        self._waiting = 0

    async def user(self, connection: HTTPConnection) -> User | None:
        """Return the user, or None without a name or with a wrong password.

        Raises:
            Problem: too many passwords are being checked (503).
        """
        login = parse_credentials(connection)
        if login is None:
            return None
        name, password = login
        # An unknown name costs a hash like a known name. It always gets the same decoy, because
        # users may have hashes of different cost: a varying response time would reveal the decoy.
        decoy = self._decoys[hash(name) % len(self._decoys)]
        user, stored = self._users.get(name, (None, decoy))
        if user is None or not self._verified.has(*login):
            is_right = await self._is_password_right(stored, password)
            if user is None or not is_right:
                # This counts as a guess, even if another authenticator accepts the request.
                connection.scope[WRONG_PASSWORD] = user is not None
                return None
            self._verified.record(*login)
        return user

    async def _is_password_right(self, stored: StoredPassword, password: str) -> bool:
        """Return True if `password` matches, hashing at most `MAX_HASHES` passwords at a time.

        A hash takes 50 ms of a processor and 16 MiB. Anyone can cause a hash by sending
        credentials, so few requests may wait for one.

        Raises:
            Problem: `MAX_WAITING` requests wait already (503).
        """
        if self._waiting >= MAX_WAITING:
            text = f"the server already checks {MAX_WAITING} passwords: try again in a second"
            raise Problem(503, text, {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._hash_slots:
                # OpenSSL releases the GIL, so in a thread the hash does not block the event loop.
                return await asyncio.to_thread(stored.matches, password)
        finally:
            self._waiting -= 1


def parse_credentials(connection: HTTPConnection) -> tuple[str, str] | None:
    """Return name and password of a request by HTTP Basic; None if missing or unreadable."""
    kind, _, value = connection.headers.get("authorization", "").partition(" ")
    try:
        text = b64decode(value.strip(), validate=True).decode()
    except ValueError:
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon and kind.lower() == "basic" else None
