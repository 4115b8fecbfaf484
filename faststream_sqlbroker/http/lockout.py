"""Limits on failed authentications, and a memory of verified secrets that pass a lockout."""

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

from faststream_sqlbroker.core.channels import (
    RANDOM_TOKEN_LENGTH,
    RegisteredEndpoint,
    is_token_valid,
)
from faststream_sqlbroker.http.responses import Problem

WINDOW = 60.0
"""Seconds per window in which failures are counted."""
MAX_KEYS = 10_000
"""Maximum keys or secrets to remember; the oldest are dropped."""
TokenLookup = Callable[[], Awaitable[list[RegisteredEndpoint | None]]]
"""Loads the registered owners of the tokens, in the order of the request's tokens."""
_UNKNOWN_HASH = "0" * 64
"""Hash that a token is compared with if its owner does not exist."""


class FailureCounter:
    """Counts failures by key, such as an address, or an address with a user name."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """Allow `limit` failures per key and minute; `clock` is monotonic."""
        self._limit = limit
        self._clock = clock
        self._period = 0.0
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *key: str) -> None:
        """Count a failure.

        If there are too many keys, the oldest is dropped, so that an attacker cannot fill the
        memory.
        """
        counts = self._get_counts()
        counts[key] += 1
        if len(counts) > MAX_KEYS:
            del counts[next(iter(counts))]

    def is_exceeded(self, *key: str) -> bool:
        """Return True if the key has failed too often in the current minute."""
        return self._get_counts()[key] >= self._limit

    def check(self, *key: str) -> None:
        """Refuse a key that has failed too often, before the secret is checked.

        Raises:
            Problem: the key has failed too often (429).
        """
        if self.is_exceeded(*key):
            wait = ceil(WINDOW - self._clock() % WINDOW)
            text = (
                f"this address has sent {self._limit} or more wrong passwords or tokens within "
                f"a minute: try again in {wait} s with the right one"
            )
            raise Problem(429, text, {"Retry-After": str(wait)})

    def _get_counts(self) -> Counter[tuple[str, ...]]:
        """Return the counts of the current minute; a new minute starts with empty counts.

        The minute is that of the clock, not of the first failure, so one number per key is enough.
        """
        period = self._clock() // WINDOW
        if period != self._period:
            self._period = period
            self._counts.clear()
        return self._counts


class VerifiedSecrets:
    """Remembers verified secrets as keyed hashes."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """Remember each secret for `seconds`; `clock` is monotonic."""
        self._seconds = seconds
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._verified_at: dict[bytes, float] = {}

    def record(self, *secret: str, is_right: bool = True) -> None:
        """Remember a secret together with its names, or with `is_right=False` forget both.

        A password is recorded with its address and user name. A password that was changed since is
        forgotten, so that it no longer passes a lockout.
        """
        key = self._hash(secret)
        self._verified_at.pop(key, None)
        if is_right:
            self._verified_at[key] = self._clock()
        if len(self._verified_at) > MAX_KEYS:
            del self._verified_at[next(iter(self._verified_at))]

    def has(self, *secret: str) -> bool:
        """Return True if the secret was verified recently."""
        verified_at = self._verified_at.get(self._hash(secret), float("-inf"))
        return self._clock() - verified_at < self._seconds

    def _hash(self, secret: tuple[str, ...]) -> bytes:
        return hmac.digest(self._key, json.dumps(secret).encode(), "sha256")


def are_random(tokens: Sequence[str]) -> bool:
    """Return True if all tokens have the length of generated tokens, which cannot be guessed.

    Shorter tokens are chosen by people in the configuration.
    """
    return all(len(token) >= RANDOM_TOKEN_LENGTH for token in tokens)


def compare_tokens(tokens: Sequence[str], owners: Sequence[RegisteredEndpoint | None]) -> bool:
    """Return True if all tokens match.

    All tokens are compared, even for missing owners, so that neither the response nor its timing
    reveals the wrong token.
    """
    hashes = [_UNKNOWN_HASH if owner is None else owner.token_hash for owner in owners]
    results = [is_token_valid(*pair) for pair in zip(tokens, hashes, strict=True)]
    return all(results)
