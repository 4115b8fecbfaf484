"""The writers of e-mails: bursts at random moments, several for some users."""

import asyncio
import random
from time import monotonic

from docs.examples.emails.service import QUEUE, Plan
from faststream_sqlbroker import SqlBroker


def moments(plan: Plan) -> list[tuple[float, str]]:
    """When an e-mail is written to which user: seconds from the beginning, in order."""
    chance = random.Random(plan.seed)
    found: list[tuple[float, str]] = []
    for user in range(plan.all_users):
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            start = chance.uniform(0, plan.publishing)
            # Some bursts are longer than an hour, and some begin in another.
            length = plan.hour * chance.choice((0.2, 0.6, 1.4))
            found += [
                (start + chance.uniform(0, length), f"user-{user}")
                for _ in range(chance.randint(1, 6))
            ]
    return sorted(found)


MOST_AT_ONCE = 200
"""Publishes under way. A writer that finds no room writes later, and so takes no longer than an
e-mail may be taken back."""


class Writers:
    """Publishes what `moments` says, and remembers what the broker has answered."""

    def __init__(self, broker: SqlBroker, plan: Plan) -> None:
        """Nothing is published before `write`."""
        self._broker, self._plan = broker, plan
        self._moments = moments(plan)
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self.published: set[int] = set()
        self.slowest = 0.0
        """Seconds of the slowest publish."""

    @property
    def total(self) -> int:
        """How many e-mails there will be."""
        return len(self._moments)

    async def write(self) -> None:
        """Publish each e-mail at its moment."""
        began = monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, (moment, user) in enumerate(self._moments):
                await asyncio.sleep(began + moment - monotonic())
                await self._room.acquire()
                tasks.create_task(self._publish(f"to {user}: e-mail {number}", user))

    async def _publish(self, text: str, user: str) -> None:
        began = monotonic()
        try:
            message_id = await self._broker.publish(text, QUEUE, key=user, delay=self._plan.undo)
        finally:
            self._room.release()
        assert isinstance(message_id, int)
        self.published.add(message_id)
        self.slowest = max(self.slowest, monotonic() - began)
