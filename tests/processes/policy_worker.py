"""A worker process for policies: python -m tests.processes.policy_worker URL FOLDER SUBSCRIBERS
(JSON).

SUBSCRIBERS maps a queue to {"policies": [[name, [argument…], {option: value}]…], "act": name,
"options": {…}}. Every start of a handler is one line in FOLDER/<process id>, written at once: it
survives SIGKILL. Times are whole microseconds of the database's clock, taken from the claim and
what has passed since by the monotonic clock: a start was at least as late as its line says, by the
time from the claim's statement to its answer. TEST_WORKER_DIES="after release_keys" in the
environment kills the process there; "before commit" and "after commit" are those of the first claim
that leases anything. TEST_WORKER_COMMITS="0.8" makes the COMMIT of each such claim under policies
take so many seconds.
"""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from datetime import time as TimeOfDay
from pathlib import Path
from time import monotonic
from typing import Any

from faststream import FastStream
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from faststream_sqlbroker import Header, SqlBroker
from faststream_sqlbroker.annotations import SqlBrokerMessage
from faststream_sqlbroker.core.outcome import Nack
from faststream_sqlbroker.core.policies.combinations import POLICY_CLASSES, Policy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.slot_use import SlotUse
from tests.processes.patience import be_patient, note_listening

KNOWN = {kind.__name__: kind for kind in POLICY_CLASSES}
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
STEP = timedelta(microseconds=1)
LOOKED: dict[int, int] = {}
"""By message, when the broker last looked whether its slot was over: what stands still after that
look starts late, and no test could tell. By the machine's clock, which is the database's and that
of all processes, in microseconds."""


@dataclass
class Start:
    """One line."""

    queue: str
    id: int
    key: str | None
    delivery: int
    attempt: int
    acquired: int
    slot: int | None
    """From when it might start."""
    at: int
    monotonic: float
    """Of the machine, in seconds."""
    clock: float
    """Of the process, in seconds since 1970."""
    pid: int = 0
    again: bool = False
    """Not a start: the handler has asked to be tried again."""
    looked: int | None = None
    """When the broker saw that the slot was not over: microseconds of the machine."""


def start_of(row: ClaimedMessage, now: float) -> Start:
    """The record of `row` as its handler starts, at `now` (monotonic)."""
    acquired = (row.acquired_at - EPOCH) // STEP
    slot = None if row.slot is None else row.slot.granted_at
    at = acquired + round((now - row.claimed_monotonic) * 1_000_000)
    if row.slot is not None and slot is not None:
        # The answer to the claim came later than its statement was executed, so `at` is too early.
        at = slot + round((now - row.slot.earliest) * 1_000_000)
    return Start(
        row.queue,
        row.id,
        row.key,
        row.deliveries_count,
        row.attempts_count,
        acquired,
        slot,
        at,
        monotonic=now,
        clock=time.time(),
        pid=os.getpid(),
        looked=LOOKED.get(row.id),
    )


def note_looks() -> None:
    """Note when each message is let go."""
    start = SlotUse.start

    def noted(use: SlotUse, row: ClaimedMessage, *, must: bool = False) -> bool:
        LOOKED[row.id] = time.monotonic_ns() // 1_000
        return start(use, row, must=must)

    SlotUse.start = noted  # type: ignore[method-assign]


class Worker:
    """Notes each start, then does what `act` says."""

    def __init__(self, folder: Path, act: str, seconds: float) -> None:
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._act = act
        self._seconds = seconds

    def _note(self, start: Start) -> None:
        os.write(self._file, (json.dumps(asdict(start)) + "\n").encode())

    async def handle(self, message: SqlBrokerMessage) -> None:
        row = message.raw_message
        start = start_of(row, monotonic())
        self._note(start)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        if self._act == "die_first" and row.deliveries_count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first = row.attempts_count == 0
        if first and self._act == "fail_first":
            raise ValueError
        if first and self._act == "retry_first":
            start.again = True
            self._note(start)
            row.record_outcome(Nack(delay=0.05, retry_possible=True))


def die(policies: Any, when: str, method: str) -> None:
    """SIGKILL this process "before" or "after" that method of the store's policies is called for
    the first time."""
    original = getattr(policies, method)

    async def and_die(*arguments: Any) -> None:
        if when == "after":
            await original(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(policies, method, and_die)


def die_claiming(policies: Any, when: str) -> None:
    """SIGKILL this process "before" or "after" the COMMIT of the first claim that leases any."""
    claim_inside = policies._claims.claim
    claim = policies.claim

    def and_die_inside(*arguments: Any) -> Any:
        if (found := claim_inside(*arguments)).rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    async def and_die(*arguments: Any) -> Any:
        found, moved = await claim(*arguments)
        if found.rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return found, moved

    if when == "before":
        policies._claims.claim = and_die_inside
    else:
        policies.claim = and_die


def commit_slowly(policies: Any, seconds: float) -> None:
    """Claims keep their transactions open, with all locks, as a slow COMMIT does."""
    claims = policies._claims
    original = claims.claim
    swapping = policies._dialect.build_compare_and_swap

    def claim(*arguments: Any) -> Any:
        found = original(*arguments)
        if found.rows:
            await_only(asyncio.sleep(seconds))
        return found

    def slow(swap: Any) -> Any:
        def write(connection: Any) -> Any:
            found = swapping(swap)(connection)
            if found:
                await_only(asyncio.sleep(seconds))
            return found

        return write

    claims.claim = claim
    policies._dialect.build_compare_and_swap = slow


def policy(name: str, arguments: list[Any], options: dict[str, Any]) -> Policy:
    """One of the known ones; {"header": name} is a Header. A Window's times may have seconds, which
    text for users has not."""
    if name == "Window":
        arguments = [TimeOfDay.fromisoformat(at) for at in arguments]
    by_header = {
        option: Header(value["header"]) if isinstance(value, dict) else value
        for option, value in options.items()
    }
    made: Policy = KNOWN[name](*arguments, **by_header)
    return made


async def run(broker: SqlBroker, engine: AsyncEngine, folder: str) -> None:
    """Until SIGTERM; the caller's engine is the caller's to end."""
    listening = [lambda: note_listening(folder)]
    await FastStream(broker, logger=None, on_startup=listening).run()
    await engine.dispose()


def main() -> None:
    """Run until SIGTERM."""
    url, folder, subscribers = sys.argv[1:]
    be_patient()
    note_looks()
    engine = create_async_engine(url, pool_size=20, max_overflow=5)
    # SQLite has one writer at a time, which more connections would only wait for.
    most = 2 if engine.dialect.name == "sqlite" else None
    broker = SqlBroker(engine, graceful_timeout=15.0, max_connections=most, logger=None)
    for queue, given in json.loads(subscribers).items():
        worker = Worker(Path(folder), given.get("act", ""), given.get("seconds", 0.0))
        broker.subscriber(
            queue,
            policies=[policy(*one) for one in given["policies"]],
            **given.get("options", {}),
        )(worker.handle)
    if dies := os.environ.get("TEST_WORKER_DIES"):
        when, where = dies.split()
        if where == "commit":
            die_claiming(broker.config.store.policies, when)
        else:
            die(broker.config.store.policies, when, where)
    if seconds := os.environ.get("TEST_WORKER_COMMITS"):
        commit_slowly(broker.config.store.policies, float(seconds))
    asyncio.run(run(broker, engine, folder))


if __name__ == "__main__":
    main()
