"""A limit on failed authentications: guessing a password or a token takes ages."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil

from faststream_sqlbroker.http.answers import Problem

WINDOW = 60.0
"""Seconds in which failures are counted together."""
MOST_KNOWN = 10_000
"""Addresses and names, or tokens, that are remembered; the oldest are forgotten."""


@dataclass(slots=True)
class _Count:
    began: float
    failures: int = 0


class RightTokens:
    """Remembers which tokens were right, by their hashes, so that a lock-out spares them."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def add(self, name: str, tokens: Sequence[str]) -> None:
        """Remember `tokens`, which were right for `name`; the oldest are forgotten."""
        key = self._key(name, tokens)
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def has(self, name: str, tokens: Sequence[str]) -> bool:
        """Whether they were right for `name`."""
        return self._key(name, tokens) in self._known

    def forget(self, name: str, tokens: Sequence[str]) -> None:
        """They are right no longer: there is another token in their place."""
        self._known.pop(self._key(name, tokens), None)

    @staticmethod
    def _key(name: str, tokens: Sequence[str]) -> bytes:
        return sha256(json.dumps([name, *tokens]).encode()).digest()


class Failures:
    """Counts failures by key: an address, or an address with the name that it tries."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        """At most `most` a minute of one key; `clock` is monotonic."""
        self._most = most
        self._clock = clock
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def check(self, *keys: tuple[str, ...]) -> None:
        """Refuse a key that has failed too often, before its secret is looked at.

        Raises:
            Problem: it has (429).
        """
        for key in keys:
            count = self._known(key)
            if count is not None and count.failures >= self._most:
                wait = max(1, ceil(count.began + WINDOW - self._clock()))
                text = (
                    f"this address has sent {self._most} or more wrong passwords or tokens within "
                    f"a minute: ask again in {wait} s, with the right one"
                )
                raise Problem(429, text, {"Retry-After": str(wait)})

    def failed(self, keys: Iterable[tuple[str, ...]]) -> None:
        """Count a failure of each of the keys."""
        for key in keys:
            count = self._known(key)
            if count is None:
                count = self._counts[key] = _Count(self._clock())
                if len(self._counts) > MOST_KNOWN:
                    self._counts.popitem(last=False)
            count.failures += 1

    def _known(self, key: tuple[str, ...]) -> _Count | None:
        count = self._counts.get(key)
        if count is not None and self._clock() - count.began >= WINDOW:
            del self._counts[key]
            return None
        return count
