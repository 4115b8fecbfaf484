"""A fleet whose workers have policies: feeds them in bursts, watches their leases, reads what they
have left."""

import asyncio
import json
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from sqlalchemy import text

from faststream_sqlbroker.core.rows import NewMessage
from tests.forked import Process
from tests.helpers import eventually
from tests.processes.conftest import MOST_ROUNDS, Fleet
from tests.processes.policy_checks import Left, micros
from tests.processes.policy_worker import Start

Keys = Sequence[str | None]
LOOK_INTERVAL = 0.05
"""Seconds: half of the time of a handler whose leases are counted."""


@dataclass
class Seen:
    """The most leases that were seen at a time, by (queue, None) and (queue, key); and how often
    was looked."""

    most: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    together: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """The most of several queues at a time, for those that were asked for."""
    looks: int = 0


class PolicyFleet:
    """Workers of `tests.processes.policy_worker` over a `Fleet`'s database."""

    def __init__(
        self, fleet: Fleet, headers: Callable[[str], dict[str, Any]] | None = None
    ) -> None:
        """`headers` makes those of a message from its key."""
        self._headers = headers
        self.live_subscribers = fleet
        self.store = fleet.store
        self.killed = 0
        self.published: dict[str, list[int]] = defaultdict(list)
        self._took: dict[int, int] = {}

    def start(
        self, subscribers: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> Process:
        """Start one worker with these."""
        return self.live_subscribers.run("policy_worker", json.dumps(subscribers), env=env)

    async def up(self, count: int) -> None:
        """Wait until so many workers are about to connect."""
        await eventually(
            lambda: len(list(self.live_subscribers.folder.iterdir())) >= count, timeout=120
        )

    async def kill_at_work(
        self, workers: Sequence[Process], work: Callable[[], Mapping[str, Keys]]
    ) -> Process:
        """Kill one of `workers` that runs handlers; until there is one, `work` is put.

        It stands still while the test looks: a handler that had only just started may have ended
        before a kill comes.
        """

        async def stopped() -> Process | None:
            await self.put(work())
            for worker in workers:
                worker.send_signal(signal.SIGSTOP)
                rows = await self.live_subscribers.rows()
                leased = {row["id"] for row in rows if row["state"] == "PROCESSING"}
                if leased & {s.id for s in self.starts() if s.pid == worker.pid}:
                    return worker
                worker.send_signal(signal.SIGCONT)
            return None

        victim = await eventually(stopped, step=0.2)
        assert victim is not None
        self.kill(victim)
        return victim

    def kill(self, worker: Process) -> None:
        """SIGKILL."""
        worker.kill()
        worker.wait()
        self.killed = worker.pid

    async def put(self, keys: Mapping[str, Keys]) -> None:
        """For each queue one message for each of its keys, all in one statement."""
        messages = [
            NewMessage(queue, b"1", key=key, headers=self._stored_headers(key))
            for queue, given in keys.items()
            for key in given
        ]
        if not messages:
            return
        asked = monotonic()
        ids = await self.store.insert(messages)
        took = round((monotonic() - asked) * 1_000_000)
        for message, found in zip(messages, ids, strict=True):
            assert found is not None
            self.published[message.queue].append(found)
            self._took[found] = took

    def _stored_headers(self, key: str | None) -> str | None:
        return None if self._headers is None or key is None else json.dumps(self._headers(key))

    async def shared(self, keys: Mapping[str, Keys]) -> int:
        """Put this, and again until two processes have started some; how often.

        One process may do all of it while the others stand still.
        """
        for times in range(1, MOST_ROUNDS + 1):
            await self.put(keys)
            await self.live_subscribers.settled(sum(map(len, self.published.values())))
            by = Counter(start.pid for start in self.starts())
            if len(by) > 1:
                return times
        raise AssertionError(f"the work of {times} rounds was not shared; starts by process: {by}")

    async def feed(
        self, ticks: Iterable[int], step: float, feeds: Mapping[str, Callable[[int], Keys]]
    ) -> None:
        """At each tick what each queue's feed says."""
        for tick in ticks:
            await self.put({queue: keys(tick) for queue, keys in feeds.items()})
            await asyncio.sleep(step)

    def starts(self, queue: str | None = None, *, again: bool = False) -> list[Start]:
        """The workers' records, by time."""
        found = [
            Start(**json.loads(line))
            for path in self.live_subscribers.folder.iterdir()
            # Not the last line of a file, unless it has ended: its process is writing it.
            for line in path.read_text().rpartition("\n")[0].splitlines()
        ]
        return sorted(
            (s for s in found if s.again is again and queue in {None, s.queue}),
            key=lambda s: (s.at, s.id),
        )

    async def left(self) -> dict[str, Left]:
        """The rows of each queue."""
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        visible = {}
        for row in await self.live_subscribers.rows(archive=True):
            rows[row["queue"]].append(row)
            visible[row["id"]] = micros(row["created_at"]) + self._took.get(row["id"], 0)
        starts = defaultdict(list)
        again = defaultdict(list)
        for start in self.starts():
            starts[start.queue].append(start)
        for start in self.starts(again=True):
            again[start.queue].append(start)
        return {
            queue: Left(rows[queue], starts[queue], again[queue], visible, self.killed)
            for queue in self.published
        }

    @asynccontextmanager
    async def watched(self, *together: tuple[str, ...]) -> AsyncIterator[Seen]:
        """Look at the leases again and again, on a connection of its own; also at those of several
        queues `together`.
        """
        seen = Seen()
        looking = asyncio.create_task(self._watch(seen, together))
        try:
            yield seen
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _watch(self, seen: Seen, together: Sequence[tuple[str, ...]]) -> None:
        key = self.live_subscribers.quoted("key")
        leases = text(f"SELECT queue, {key} FROM message WHERE state = 'PROCESSING'")
        while True:
            async with self.store.engine.connect() as connection:
                rows = (await connection.execute(leases)).all()
            now = Counter[tuple[str, str | None]]()
            for queue, of in rows:
                now[queue, None] += 1
                if of is not None:
                    now[queue, str(of)] += 1
            seen.most |= now
            for queues in together:
                count = sum(now[queue, None] for queue in queues)
                seen.together[queues] = max(seen.together[queues], count)
            seen.looks += 1
            await asyncio.sleep(LOOK_INTERVAL)
