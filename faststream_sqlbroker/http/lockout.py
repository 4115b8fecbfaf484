"""How a right token passes while its address is locked out for wrong ones.

A random token of 256 bits cannot be guessed, so it need not wait for those who guess next to it.
It is compared with the stored hashes of its queue or consumer. These are looked up once a second at
most, however many tokens are tried, and only for so many names a second in a process: a lock-out
bounds the looks at the database in any case. Shorter tokens, which an administrator has chosen,
wait: they may be guessed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from faststream_sqlbroker.core.channels import RANDOM_TOKEN, token_fits

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
