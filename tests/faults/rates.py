"""What a Throttle keeps of its rate while its process is disturbed: one run, and what it came to.

Two queues with as many messages have workers in one process: one is throttled, the other is plain
and tells whether the machine had time for them.
"""

import asyncio
import contextlib
import random
import re
import signal
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from faststream_sqlbroker import SqlBroker, Throttle
from tests.faults.history import Recorder, read
from tests.forked import Forked
from tests.helpers import eventually

RATE = 10
PER = 1.0
"""Seconds."""
SECONDS = 16.0
"""From the first start of the throttled queue to the end of a run."""
MESSAGES = 250
"""Of each queue: more than may start in a run."""
LEAST = {"none": 0.9, "blocked": 0.7, "jitter": 0.8, "stopped": 0.8}
"""The disturbances, and the part of the rate that each must leave."""
LEAST_WITH_LAG = 0.9
"""The part of N / (per + lag) that must be left always."""
LEAST_PLAIN = 2.0
"""A machine on which the plain queue has less than so many times the rate is too busy."""
SLACK = 0.05
"""Seconds from the broker's last look at the clock to the handler's note, on a busy machine."""
LAG = re.compile(r"starts come up to ([\d.]+) s after their slots")
"""What `explain` says of a lag that is worth it; an unsaid one counts as none."""


@dataclass(frozen=True)
class Kept:
    """What came of one run, or of several."""

    rate: float
    """Starts a second of the throttled queue."""
    lag: float
    """Seconds by which starts came after their slots, as `explain` tells."""
    most: int
    """Starts in any period."""
    plain: float
    """Starts a second of the plain queue."""

    @property
    def share(self) -> float:
        """The part of the rate."""
        return self.rate * PER / RATE

    @property
    def share_with_lag(self) -> float:
        """The part of the rate that the lag leaves."""
        return self.rate * (PER + self.lag) / RATE

    @property
    def measured(self) -> bool:
        """Whether the machine had time for it."""
        return self.plain >= LEAST_PLAIN * RATE / PER

    def missed(self, disturbance: str) -> list[str]:
        """The targets that it does not reach."""
        targets = {
            f"{LEAST[disturbance]} of N": self.share >= LEAST[disturbance],
            f"{LEAST_WITH_LAG} of N / (per + lag)": self.share_with_lag >= LEAST_WITH_LAG,
            f"at most {RATE} in {PER:g} s": self.most <= RATE,
        }
        return [name for name, reached in targets.items() if not reached]


def middle(runs: Sequence[Kept]) -> Kept:
    """The medians of `runs`, and the most starts in a period of any of them."""
    rates, lags, plain = (
        median(getattr(run, name) for run in runs) for name in ("rate", "lag", "plain")
    )
    return Kept(rates, lags, max(run.most for run in runs), plain)


def steady_rate(starts: Sequence[float], end: float) -> float:
    """Starts a second after the first `RATE`, which may come at once, until the last one.

    A queue that stands still before `end` has the rate of that time, too.
    """
    if len(starts) <= RATE:
        return 0.0
    last = max(starts[-1], end - 2 * PER)
    return (len(starts) - RATE) / (last - starts[RATE - 1])


def most_in_a_period(starts: Sequence[float], stops: Sequence[tuple[float, float]]) -> int:
    """The most of `starts`, in order, that surely were in one period: each may be earlier than its
    note, as the process may have been stopped between the two.
    """
    earliest = [
        min([at - SLACK, *(began for began, ended in stops if began <= at < ended + SLACK)])
        for at in starts
    ]
    return max(bisect_left(starts, at + PER) - n for n, at in enumerate(earliest))


async def measure(url: str, folder: Path, disturbance: str) -> Kept:
    """One run on an empty database; `folder` is for its events.

    Raises:
        AssertionError: nothing has started in time.
    """
    engine = create_async_engine(url)
    broker = SqlBroker(engine, logger=None)
    stops: list[tuple[float, float]] = []
    lags: list[float] = []
    try:
        await broker.create_tables()
        for queue in ("plain", "throttled"):
            ids = await broker.publish_batch(*range(MESSAGES), queue=queue)
        worker = Forked(work, url, folder, disturbance)
        try:
            await eventually(lambda: _starts(folder, "throttled"))
            stopping = asyncio.create_task(_stop(worker, stops, disturbance))
            end = time.monotonic() + SECONDS
            while (now := time.monotonic()) < end:
                for reason in (await broker.admin.explain(ids[-1] or 0)).reasons:
                    lags += [float(lag) for lag in LAG.findall(reason.text)] or [0.0]
                await asyncio.sleep(0.5)
            stopping.cancel()
        finally:
            worker.kill()
            await asyncio.to_thread(worker.wait)
    finally:
        await engine.dispose()
    starts, plain = ([at for at in _starts(folder, q) if at < now] for q in ("throttled", "plain"))
    took = plain[-1] - plain[0] if len(plain) > 1 else float("inf")
    return Kept(
        steady_rate(starts, now),
        median(lags or [0.0]),
        most_in_a_period(starts, stops),
        len(plain) / took,
    )


def _starts(folder: Path, queue: str) -> list[float]:
    return [each["at"] for each in read(folder) if each["queue"] == queue]


async def _stop(worker: Forked, stops: list[tuple[float, float]], disturbance: str) -> None:
    """Keep `worker` from running for half of each second."""
    await asyncio.sleep(random.random())
    while disturbance == "stopped":
        began = time.monotonic()
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        worker.send_signal(signal.SIGCONT)
        stops.append((began, time.monotonic()))
        await asyncio.sleep(0.5)


def work(url: str, folder: Path, disturbance: str) -> None:
    """Handle both queues until it is killed."""
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_work(url, Recorder(folder), disturbance))


async def _work(url: str, recorder: Recorder, disturbance: str) -> None:
    engine = create_async_engine(url)
    if disturbance == "jitter":
        _slow_down(engine)
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("throttled", policies=[Throttle(RATE, per=f"{PER:g}s")], max_workers=4)
    async def throttled(body: int) -> None:
        recorder.note("start", queue="throttled")

    @broker.subscriber("plain", max_workers=4)
    async def plain(body: int) -> None:
        recorder.note("start", queue="plain")

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
