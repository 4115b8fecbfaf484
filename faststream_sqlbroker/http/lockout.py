"""A limit on failed authentications, so that guessing a password or a token takes ages; and how a
right token passes while its address is locked out for wrong ones.

A random token of 256 bits cannot be guessed, so it need not wait for those who guess next to it.
It is compared with the stored hashes of its queue or consumer. These are looked up once a second at
most, however many tokens are tried, and only for so many names a second in a process: a lock-out
bounds the looks at the database in any case. Shorter tokens, which an administrator has chosen,
wait: they may be guessed.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil

from faststream_sqlbroker.core.channels import RANDOM_TOKEN, token_fits
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


HELD = 1.0
"""Seconds for which the hashes of a name are not looked up again for addresses locked out."""
LOOKS = 10
"""Names that are looked up for them in a second, in one process."""
MOST_NAMES = 1_000
"""Names whose hashes are held; the oldest are forgotten."""
Look = Callable[[], Awaitable[list[str]]]
"""Gets the hashes of the tokens that a name needs, in the order of those that a request gives."""


@dataclass(slots=True)
class _Held:
    since: float
    looked: asyncio.Future[list[str]]


def are_random(tokens: Sequence[str]) -> bool:
    """Whether they cannot be guessed: all are as long as new tokens are."""
    return all(len(token) >= RANDOM_TOKEN for token in tokens)


class LockedOut:
    """Compares tokens of addresses that are locked out, with few looks at the database."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic."""
        self._clock = clock
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._began = clock()
        self._looks = 0

    async def fits(self, name: str, tokens: Sequence[str], look: Look) -> bool:
        """Whether `tokens` are right for `name`, as far as is known without one look too many.

        Raises:
            StoreError: the database could not be asked.
        """
        # A token of an administrator's choice could be guessed here as fast as requests come.
        if not are_random(tokens):
            return False
        held = self._current(name, look)
        if held is None:
            return False
        # Shared: a request that is cut off must not end the look of the others.
        hashes = await asyncio.shield(held)
        # All are compared, so the time of the answer does not tell which one was wrong.
        each = [token_fits(*pair) for pair in zip(tokens, hashes, strict=True)]
        return all(each)

    def _current(self, name: str, look: Look) -> asyncio.Future[list[str]] | None:
        """The look for `name` of the last second, else a new one, else an older one, if any."""
        now = self._clock()
        held = self._held.get(name)
        if held is not None and now - held.since < HELD:
            return held.looked
        if not self._may_look(now):
            return held.looked if held is not None and _is_known(held.looked) else None
        looked = asyncio.ensure_future(look())
        # If all requests were cut off, nothing else reads its error.
        looked.add_done_callback(_read)
        self._held[name] = _Held(now, looked)
        self._held.move_to_end(name)
        if len(self._held) > MOST_NAMES:
            self._held.popitem(last=False)
        return looked

    def _may_look(self, now: float) -> bool:
        if now - self._began >= HELD:
            self._began = now
            self._looks = 0
        self._looks += 1
        return self._looks <= LOOKS


def _is_known(looked: asyncio.Future[list[str]]) -> bool:
    return looked.done() and not looked.cancelled() and looked.exception() is None


def _read(looked: asyncio.Future[list[str]]) -> None:
    if not looked.cancelled():
        looked.exception()
