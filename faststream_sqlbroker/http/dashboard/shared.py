"""What all viewers of a process share for some seconds, so that a page does not ask again."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar

from faststream_sqlbroker.core.overview import QueueOverview

if TYPE_CHECKING:
    from faststream_sqlbroker.admin import Admin, Findings

PERIOD = 2.0
"""Seconds between two looks at the queues."""
REST = 9.0
"""A look that takes long is followed by a rest of so many times its length."""
MOST_ANSWERS = 64
"""Pages, each with its search, whose answers are kept."""
T = TypeVar("T")


class Shared(Generic[T]):
    """The answer to one question."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        """`read` asks the database."""
        self.read = read
        self._turn = asyncio.Lock()
        self._answer: list[T] = []
        self._good_until = float("-inf")
        self._changes = 0

    @property
    def is_old(self) -> bool:
        """Whether its answer is not shared any more, and nothing reads a new one."""
        return not self._turn.locked() and monotonic() >= self._good_until

    async def get(self) -> T:
        """An answer of the last `PERIOD` seconds, or of the last `REST` times its own length.

        Those who ask while it is read get the same. Raises what `read` raises.
        """
        async with self._turn:
            if not self._answer or monotonic() >= self._good_until:
                return await self._look()
            return self._answer[0]

    async def renew(self) -> T:
        """A new answer, which the others share from now on."""
        async with self._turn:
            return await self._look()

    def forget(self) -> None:
        """Something has changed: the next that asks gets a new answer."""
        self._changes += 1
        self._good_until = float("-inf")

    async def _look(self) -> T:
        changes = self._changes
        begun = monotonic()
        found = await self.read()
        ended = monotonic()
        self._answer = [found]
        # What changed while it was read may not be in it.
        if self._changes == changes:
            self._good_until = ended + max(PERIOD, REST * (ended - begun))
        return found


class Answers(Generic[T]):
    """The answers to many questions; those that are not shared any more are dropped."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Shared[T]] = {}

    async def get(
        self, question: Hashable, read: Callable[[], Awaitable[T]], *, renew: bool = False
    ) -> T:
        """What `read` answers, or has answered lately unless `renew`: see `Shared`."""
        shared = self._kept.pop(question, None) or Shared(read)
        # What was given with an earlier request may be closed by now.
        shared.read = read
        # A page may hold a body of megabytes: none is kept for longer than it is shared.
        self._kept = {name: each for name, each in self._kept.items() if not each.is_old}
        self._kept[question] = shared
        if len(self._kept) > MOST_ANSWERS:
            del self._kept[next(iter(self._kept))]
        return await (shared.renew() if renew else shared.get())

    def forget(self) -> None:
        """Something has changed; who waits for an answer still gets it."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class Lately:
    """What pages share."""

    queues: Shared[list[QueueOverview]]
    findings: "Shared[Findings]"
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a page looks through the tables."""

    def forget(self) -> None:
        """An operator has changed something."""
        self.queues.forget()
        self.findings.forget()


def lately_of(admin: Callable[[], "Admin"]) -> Lately:
    """Of a broker."""
    queues = Shared(lambda: admin().queues())

    async def read() -> "Findings":
        return await admin().findings(queues=await queues.get())

    return Lately(queues, Shared(read))
