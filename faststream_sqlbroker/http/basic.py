"""HTTP's Basic authentication: a name and a password with each request. Passwords are stored as
their scrypt hashes, with the parameters in the text.
"""

import asyncio
import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.lockout import RightSecrets
from faststream_sqlbroker.http.users import Role, User

COST = 2**14
"""scrypt's N: with `BLOCK` one hash takes 16 MiB and some 50 ms."""
MAX_COST = 2**20
"""A stored hash may not ask for more: it would take 1 GiB."""
BLOCK = 8
"""scrypt's r."""
LENGTH = 32
"""Bytes of a hash."""
MIN_PASSWORD = 8
"""Characters of a password."""
VERIFIED = 60.0
"""Seconds for which a password that was right is not hashed again."""
HASHING = 2
"""Hashes at a time: each takes 16 MiB and a processor, and anyone can ask for one."""
WAITING = 32
"""Hashes that may wait for their turn; more are refused at once."""


WRONG_PASSWORD = "sqlbroker.wrong_password"  # noqa: S105 - a key
"""In the scope of a request: whether its password is wrong for a user whom `BasicAuth` knows."""


@dataclass(frozen=True, slots=True)
class StoredPassword:
    """A parsed hash, with the parameters of scrypt."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes = bytes(LENGTH)

    def hash(self, password: str) -> bytes:
        """Return the hash of `password`; takes some 50 ms of a processor."""
        return hashlib.scrypt(
            password.encode(errors="surrogatepass"),
            salt=self.salt,
            n=self.cost,
            r=self.block,
            p=self.parallel,
            # By default OpenSSL refuses what needs more than 32 MiB.
            maxmem=256 * self.cost * self.block,
            dklen=LENGTH,
        )

    def fits(self, password: str) -> bool:
        """Return whether it is the hash of `password`, after as long as `hash` takes."""
        return hmac.compare_digest(self.hash(password), self.digest)


def hash_password(password: str) -> str:
    """The text to store for `password`.

    Raises:
        SetupError: it has less than 8 characters.
    """
    if len(password) < MIN_PASSWORD:
        raise SetupError(f"a password has {MIN_PASSWORD} characters or more, got {len(password)}")
    stored = StoredPassword(COST, BLOCK, 1, secrets.token_bytes(16))
    salt, digest = (b64encode(part).decode() for part in (stored.salt, stored.hash(password)))
    return f"scrypt${stored.cost}${stored.block}${stored.parallel}${salt}${digest}"


def stored_password(text: str) -> StoredPassword:
    """The parts of what `hash_password` has returned.

    Raises:
        SetupError: it is not of that form; the text is not shown, as it may be a password.
    """
    try:
        kind, *numbers, salt, digest = text.split("$")
        cost, block, parallel = (int(number) for number in numbers)
        parts = [b64decode(part, validate=True) for part in (salt, digest)]
        is_power = cost.bit_count() == 1 < cost <= MAX_COST
        is_small = 1 <= block <= BLOCK and 1 <= parallel <= BLOCK
        if kind == "scrypt" and is_power and is_small and len(parts[1]) == LENGTH:
            return StoredPassword(cost, block, parallel, *parts)
    except (AttributeError, ValueError):
        pass
    form = "scrypt$N$r$p$salt$hash"
    raise SetupError(
        f"a password is given as its hash, {form}: make one with `sqlbroker hash-password`"
    )


@dataclass(frozen=True, slots=True)
class Login:
    """A user who is known by a password.

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
        """Check all."""
        if ":" in User(self.name, self.role).name:
            raise SetupError(f"a name has no colon in Basic authentication, got {short(self.name)}")
        stored_password(self.password_hash)

    def __repr__(self) -> str:
        return f"Login({self.name!r}, {self.role!r})"


class BasicAuth:
    """Knows users by name and password.

    Passwords that were right are remembered for a minute, as a keyed hash, so that not each request
    costs one of scrypt's.
    """

    def __init__(self, logins: Iterable[Login]) -> None:
        """Let these in.

        Raises:
            SetupError: there are none, or two of one name.
        """
        self._users: dict[str, tuple[User, StoredPassword]] = {}
        for login in logins:
            if login.name in self._users:
                raise SetupError(f"two logins have the name {short(login.name)}")
            user = User(login.name, login.role)
            self._users[login.name] = (user, stored_password(login.password_hash))
        if not self._users:
            raise SetupError("BasicAuth needs at least one Login")
        self._decoys = [stored for _, stored in self._users.values()]
        self._right = RightSecrets(VERIFIED, monotonic)
        self._places = asyncio.Semaphore(HASHING)
        self._waiting = 0

    async def user(self, connection: HTTPConnection) -> User | None:
        """Who it is; None without a name, or with a wrong password.

        Raises:
            Problem: too many passwords are being checked (503).
        """
        login = credentials(connection)
        if login is None:
            return None
        name, password = login
        # An unknown name costs as much as a known one, and always the same: the time of the answer
        # does not tell of it.
        decoy = self._decoys[hash(name) % len(self._decoys)]
        user, stored = self._users.get(name, (None, decoy))
        if user is None or not self._right.has(*login):
            fits = await self._fits(stored, password)
            if user is None or not fits:
                # Another way may let the request in: it is a guess all the same.
                connection.scope[WRONG_PASSWORD] = user is not None
                return None
            self._right.note(*login)
        return user

    async def _fits(self, stored: StoredPassword, password: str) -> bool:
        if self._waiting >= WAITING:
            text = f"{WAITING} passwords are being checked by now: ask again in a second"
            raise Problem(503, text, {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._places:
                # In a thread: OpenSSL gives the interpreter's lock back, so the event loop goes on.
                return await asyncio.to_thread(stored.fits, password)
        finally:
            self._waiting -= 1


def credentials(connection: HTTPConnection) -> tuple[str, str] | None:
    """Name and password of a request; None: it has none, or they cannot be read."""
    kind, _, value = connection.headers.get("authorization", "").partition(" ")
    try:
        text = b64decode(value.strip(), validate=True).decode()
    except ValueError:
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon and kind.lower() == "basic" else None
