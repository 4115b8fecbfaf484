"""What a Throttle keeps of its rate while its process is disturbed: one run, and what it came to.

Two queues with as many messages have workers in one process: one is throttled, the other is plain
and tells whether the machine had time for them.
"""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage, Throttle
from tests.faults.history import Recorder, read
from tests.forked import Forked
from tests.helpers import eventually
from tests.processes.policy_checks import ROUNDING, SECOND, over_rate
from tests.processes.policy_worker import LOOKED, note_looks

RATE = 10
PER = 1.0
"""Seconds."""
SECONDS = 16.0
"""From the first start of the throttled queue to the end of a run."""
MESSAGES = 250
"""Of the throttled queue: more than may start in a run."""
LEAST = {"none": 0.9, "blocked": 0.7, "jitter": 0.8, "stopped": 0.8}
"""The disturbances, and the part of the rate that each must leave."""
LEAST_WITH_LAG = 0.9
"""The part of N / (per + lag) that must be left always."""
LEAST_PLAIN = 1.0
"""Where the plain queue has less than so many times the rate, a missed target does not count."""
PUBLISHED = 20
"""Messages for the plain queue every half second: four times as many as it must have."""
WINDOW = 4.0
"""Seconds: the plain queue counts by the worst of so long a time."""
LOGS = text("SELECT info FROM message_policy_state WHERE scope LIKE '%throttled%'")
"""The Throttle's log. It has the lag that `explain` names only where the lag costs 5 % or more."""
PLAIN_WORKERS = 16
"""Workers of the plain queue: enough that statements which take long are not its limit."""


@dataclass(frozen=True)
class Kept:
    """What came of one run."""

    rate: float
    """Starts a second of the throttled queue."""
    lag: float
    """Seconds by which starts came after their slots, as the Throttle's log has them."""
    over: int
    """Periods with more starts than there may be."""
    plain: float
    """Starts a second of the plain queue, at its worst."""

    @property
    def share(self) -> float:
        """The part of the rate."""
        return self.rate * PER / RATE

    @property
    def share_with_lag(self) -> float:
        """The part of the rate that the lag leaves."""
        return self.rate * (PER + self.lag) / RATE

    def is_conclusive(self, disturbance: str) -> bool:
        """Whether the run counts: the plain queue kept up, or all targets were reached anyway.

        On SQLite, statements that take long keep the only writer's lock: the plain queue stands
        still there, and excuses a missed rate only, never too many starts.
        """
        keeps_up = self.plain >= LEAST_PLAIN * RATE / PER
        return keeps_up or self.over > 0 or not Case.of([self]).missed(disturbance)


@dataclass(frozen=True)
class Case:
    """What came of several runs: medians, and the worst of the others."""

    share: float
    share_with_lag: float
    lag: float
    over: int
    plain: float

    @classmethod
    def of(cls, runs: Sequence[Kept]) -> "Case":
        """There is at least one."""
        share, with_lag, lag = (
            median(getattr(run, name) for run in runs)
            for name in ("share", "share_with_lag", "lag")
        )
        return cls(share, with_lag, lag, sum(r.over for r in runs), min(r.plain for r in runs))

    def missed(self, disturbance: str) -> list[str]:
        """The targets that it does not reach."""
        targets = {
            f"{LEAST[disturbance]} of N": self.share >= LEAST[disturbance],
            f"{LEAST_WITH_LAG} of N / (per + lag)": self.share_with_lag >= LEAST_WITH_LAG,
            f"at most {RATE} in {PER:g} s": not self.over,
        }
        return [name for name, reached in targets.items() if not reached]


def steady_rate(starts: Sequence[float], end: float) -> float:
    """Starts a second after the first `RATE`, which may come at once, until the last one.

    A queue that stands still before `end` has the rate of that time, too.
    """
    if len(starts) <= RATE:
        return 0.0
    last = max(starts[-1], end - 2 * PER)
    return (len(starts) - RATE) / (last - starts[RATE - 1])


def worst_rate(starts: Sequence[float], begin: float, end: float) -> float:
    """The fewest starts a second in any `WINDOW` from `begin` to `end`."""
    steps = int((end - begin - WINDOW) / (WINDOW / 2)) + 1
    windows = [begin + n * WINDOW / 2 for n in range(max(1, steps))]
    return min(sum(at <= s < at + WINDOW for s in starts) for at in windows) / WINDOW


async def measure(url: str, folder: Path, disturbance: str) -> Kept:
    """One run on an empty database; `folder` is for its events.

    Raises:
        AssertionError: nothing has started in time.
    """
    engine = create_async_engine(url)
    broker = SqlBroker(engine, logger=None)
    lags: list[float] = []
    try:
        await broker.create_tables()
        await broker.publish_batch(*range(MESSAGES), queue="throttled")
        worker = Forked(work, url, folder, disturbance)
        try:
            await eventually(lambda: _looks(folder, "throttled"))
            stopping = asyncio.create_task(_stop(worker, disturbance))
            begin = time.monotonic()
            while (now := time.monotonic()) < begin + SECONDS:
                await broker.publish_batch(*range(PUBLISHED), queue="plain")
                lags += await _read_lags(engine)
                await asyncio.sleep(0.5)
            stopping.cancel()
        finally:
            worker.kill()
            await asyncio.to_thread(worker.wait)
    finally:
        await engine.dispose()
    looks = [at for at in _looks(folder, "throttled") if at < now * SECOND]
    plain = [at / SECOND for at in _looks(folder, "plain")]
    return Kept(
        steady_rate([at / SECOND for at in looks], now),
        median(lags),
        len(over_rate(looks, RATE, round(PER * SECOND) - ROUNDING)),
        # What was published at the end may have had no time.
        worst_rate(plain, begin + 1.0, now - 1.0),
    )


async def _read_lags(engine: AsyncEngine) -> list[float]:
    """Seconds by which recent starts came after their slots."""
    async with engine.connect() as connection:
        stored = (await connection.execute(LOGS)).scalars().all()
    logs = [json.loads(info) if isinstance(info, str) else info for info in stored]
    return [log["lag"] / SECOND for log in logs if log and "lag" in log]


def _looks(folder: Path, queue: str) -> list[int]:
    """When the broker let the messages of `queue` start: microseconds of the machine."""
    return sorted(each["looked"] for each in read(folder) if each["queue"] == queue)


async def _stop(worker: Forked, disturbance: str) -> None:
    """Keep `worker` from running for half of each second."""
    await asyncio.sleep(random.random())
    while disturbance == "stopped":
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        worker.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)


def work(url: str, folder: Path, disturbance: str) -> None:
    """Handle both queues until it is killed."""
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_work(url, Recorder(folder), disturbance))


async def _work(url: str, recorder: Recorder, disturbance: str) -> None:
    note_looks()
    engine = create_async_engine(url)
    if disturbance == "jitter":
        _slow_down(engine)
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("throttled", policies=[Throttle(RATE, per=f"{PER:g}s")], max_workers=4)
    @broker.subscriber("plain", max_workers=PLAIN_WORKERS)
    async def handle(message: SqlBrokerMessage) -> None:
        looked = LOOKED.get(message.raw_message.id, time.monotonic_ns() // 1_000)
        recorder.note("start", queue=message.queue, looked=looked)

    await broker.start()
    while True:
        if disturbance == "blocked":
            time.sleep(0.3)
        await asyncio.sleep(0.02)


def _slow_down(engine: AsyncEngine) -> None:
    """Let each statement take 20 to 150 ms longer."""

    def wait(*_: object) -> None:
        await_only(asyncio.sleep(random.uniform(0.02, 0.15)))

    for sent in ("before_cursor_execute", "commit", "rollback"):
        event.listen(engine.sync_engine, sent, wait)
