"""HTTP's Basic authentication: a name and a password with each request. Passwords are stored as
their scrypt hashes, with the parameters in the text.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic

from starlette.requests import HTTPConnection

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.users import Role, User

COST = 2**14
"""scrypt's N: with `BLOCK` one hash takes 16 MiB and some 50 ms."""
MOST_COST = 2**20
"""A stored hash may not ask for more: it would take 1 GiB."""
BLOCK = 8
"""scrypt's r."""
PARALLEL = 1
"""scrypt's p."""
LENGTH = 32
"""Bytes of a hash."""
SALT = 16
"""Bytes of a salt."""
SHORTEST = 8
"""Characters of a password."""
_FORM = "scrypt$N$r$p$salt$hash"


@dataclass(frozen=True, slots=True)
class StoredPassword:
    """A parsed hash."""

    cost: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes

    def fits(self, password: str) -> bool:
        """Whether it is the hash of `password`; takes some 50 ms of a processor."""
        found = _scrypt(password, self.salt, self.cost, self.block, self.parallel)
        return hmac.compare_digest(found, self.digest)


def hash_password(password: str) -> str:
    """The text to store for `password`.

    Raises:
        SetupError: it has less than 8 characters.
    """
    if len(password) < SHORTEST:
        raise SetupError(f"a password has {SHORTEST} characters or more, got {len(password)}")
    salt = secrets.token_bytes(SALT)
    digest = _scrypt(password, salt, COST, BLOCK, PARALLEL)
    parts = (base64.b64encode(part).decode() for part in (salt, digest))
    return "$".join(("scrypt", str(COST), str(BLOCK), str(PARALLEL), *parts))


def stored_password(text: str) -> StoredPassword:
    """The parts of what `hash_password` has returned.

    Raises:
        SetupError: it is not of that form; the text is not shown, as it may be a password.
    """
    wrong = SetupError(
        f"a password is given as its hash, {_FORM}: make one with `sqlbroker hash-password`"
    )
    try:
        kind, *numbers, salt, digest = text.split("$")
        cost, block, parallel = (int(number) for number in numbers)
        stored = StoredPassword(
            cost,
            block,
            parallel,
            base64.b64decode(salt, validate=True),
            base64.b64decode(digest, validate=True),
        )
    except (AttributeError, ValueError, binascii.Error):
        raise wrong from None
    is_power = cost > 1 and not cost & (cost - 1)
    small = 1 <= block <= BLOCK and 1 <= parallel <= BLOCK and cost <= MOST_COST
    if kind != "scrypt" or not is_power or not small or len(stored.digest) != LENGTH:
        raise wrong
    return stored


def unmatched_password() -> StoredPassword:
    """A hash that no password fits, which takes as long to try as a user's."""
    return StoredPassword(COST, BLOCK, PARALLEL, bytes(SALT), bytes(LENGTH))


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    return hashlib.scrypt(
        password.encode(errors="surrogatepass"),
        salt=salt,
        n=cost,
        r=block,
        p=parallel,
        # OpenSSL refuses what needs more than 32 MiB unless it is told.
        maxmem=256 * cost * block,
        dklen=LENGTH,
    )


VERIFIED = 60.0
"""Seconds for which a password that was right is not hashed again."""
MOST_VERIFIED = 1_000
"""Passwords that are remembered as right."""
HASHING = 2
"""Hashes at a time: each takes 16 MiB and a processor, and anyone can ask for one."""
WAITING = 32
"""Hashes that may wait for their turn; more are refused at once."""


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
        self._unknown = unmatched_password()
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, float] = OrderedDict()
        self._places = asyncio.Semaphore(HASHING)
        self._waiting = 0

    async def user(self, connection: HTTPConnection) -> User | None:
        """Who it is; None without a name, or with a wrong password.

        Raises:
            Problem: too many passwords are being checked (503).
        """
        given = credentials(connection)
        if given is None:
            return None
        name, password = given
        # A name that is not known costs as much: the time of the answer does not tell of it.
        user, stored = self._users.get(name, (None, self._unknown))
        if user is None:
            await self._hashed(stored, password)
            return None
        mark = hmac.new(self._key, f"{name}:{password}".encode("utf-8", "replace"), sha256).digest()
        if self._verified.get(mark, float("-inf")) > monotonic():
            return user
        if not await self._hashed(stored, password):
            return None
        self._verified[mark] = monotonic() + VERIFIED
        if len(self._verified) > MOST_VERIFIED:
            self._verified.popitem(last=False)
        return user

    async def _hashed(self, stored: StoredPassword, password: str) -> bool:
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
    if kind.lower() != "basic":
        return None
    try:
        text = base64.b64decode(value.strip(), validate=True).decode()
    except (ValueError, binascii.Error):
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon else None
