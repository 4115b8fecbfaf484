"""Passwords as they are stored: scrypt, with the parameters in the text."""

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from faststream_sqlbroker.exceptions import SetupError

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
