"""A limit on failed authentications, so that guessing a password or a token takes ages; and a
memory of right secrets, which pass while others guess.
"""

import hmac
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

from faststream_sqlbroker.core.channels import RANDOM_TOKEN, Registered, token_fits
from faststream_sqlbroker.http.answers import Problem

WINDOW = 60.0
"""Seconds in which failures are counted together."""
MAX_KEYS = 10_000
"""Keys or secrets that are remembered; the oldest are forgotten."""
Look = Callable[[], Awaitable[list[Registered | None]]]
"""Gets what a name needs the tokens of, in the order of those that a request gives."""
_UNKNOWN_HASH = "0" * 64
"""What a token of something that does not exist is compared with."""


class Failures:
    """Counts by key, such as an address, or an address with the name that it tries."""

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        """Allow `limit` failures of each key in a minute; `clock` is monotonic."""
        self._limit = limit
        self._clock = clock
        self._period = 0.0
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *key: str) -> None:
        """Count a failure."""
        counts = self._current()
        counts[key] += 1
        if len(counts) > MAX_KEYS:
            del counts[next(iter(counts))]

    def is_full(self, *key: str) -> bool:
        """Return whether the key has failed too often."""
        return self._current()[key] >= self._limit

    def check(self, *key: str) -> None:
        """Refuse a key that has failed too often, before its secret is looked at.

        Raises:
            Problem: it has (429).
        """
        if self.is_full(*key):
            wait = ceil(WINDOW - self._clock() % WINDOW)
            text = (
                f"this address has sent {self._limit} or more wrong passwords or tokens within "
                f"a minute: ask again in {wait} s, with the right one"
            )
            raise Problem(429, text, {"Retry-After": str(wait)})

    def _current(self) -> Counter[tuple[str, ...]]:
        period = self._clock() // WINDOW
        if period != self._period:
            self._period = period
            self._counts.clear()
        return self._counts


class RightSecrets:
    """Remembers secrets that were right, as keyed hashes."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """Remember each for `seconds`; `clock` is monotonic."""
        self._seconds = seconds
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._added: dict[bytes, float] = {}

    def note(self, *secret: str, right: bool = True) -> None:
        """Remember it with the names that it is right for, or forget it if it is wrong by now."""
        key = self._hash(secret)
        self._added.pop(key, None)
        if right:
            self._added[key] = self._clock()
        if len(self._added) > MAX_KEYS:
            del self._added[next(iter(self._added))]

    def has(self, *secret: str) -> bool:
        """Return whether it was right lately."""
        added = self._added.get(self._hash(secret), float("-inf"))
        return self._clock() - added < self._seconds

    def _hash(self, secret: tuple[str, ...]) -> bytes:
        return hmac.digest(self._key, json.dumps(secret).encode(), "sha256")


def are_random(tokens: Sequence[str]) -> bool:
    """Return whether no token can be guessed: all are as long as new tokens are."""
    return all(len(token) >= RANDOM_TOKEN for token in tokens)


def fit(tokens: Sequence[str], needed: Sequence[Registered | None]) -> bool:
    """Compare all, also those of what does not exist: neither the answer nor its time tells which
    one was wrong.
    """
    hashes = [_UNKNOWN_HASH if each is None else each.token_hash for each in needed]
    results = [token_fits(*pair) for pair in zip(tokens, hashes, strict=True)]
    return all(results)
