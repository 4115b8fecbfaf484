"""A worker for the fault machine: python -m tests.faults.worker URL FOLDER [OPTIONS as JSON].

Queues: `plain`, `tx` (transactional) and `ordered` answer to `out` and sometimes fail; `once` is ACK_FIRST.
Options: seed; lease and others of the subscribers; `die`: kill this process in the middle of a step;
`defect`: one that is planted on purpose (`tests.faults.defects`).
"""

import asyncio
import json
import logging
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faststream import AckPolicy, FastStream
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, SqlBrokerMessage, SqlConnection
from tests.faults import defects
from tests.faults.history import Recorder

REPORTS = ("lease lost", "settle unknown", "is not known to be committed")


class Reports(logging.Handler):
    """Records what the broker says of lost leases and unknown settles."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message that a report is about."""
        said = record.getMessage()
        self._recorder.note("said", text=said)
        message_id = getattr(record, "message_id", "")
        if any(part in said for part in REPORTS) and message_id:
            delivery = re.search(r"delivery (\d+)", said)
            extra = {"deliveries": int(delivery[1])} if delivery else {}
            self._recorder.note("report", id=int(message_id), text=said, **extra)


class Handlers:
    """What is done with a message: slow now and then, failing now and then, always recorded."""

    def __init__(self, recorder: Recorder, seed: int, lease: float, *, one_writer: bool) -> None:
        self._recorder, self._random, self._lease = recorder, random.Random(seed), lease
        self._one_writer = one_writer

    def _start(self, number: int, message: SqlBrokerMessage) -> None:
        fields = {"number": number, "queue": message.queue, "attempts": message.attempts_count}
        self._recorder.note("start", **_ids(message), **fields)

    async def _work(self, number: int, message: SqlBrokerMessage) -> None:
        # Longer than a lease, which has to be renewed; a transaction in SQLite would keep that from happening.
        slow = number % 12 == 0 and not (self._one_writer and message.queue == "tx")
        await asyncio.sleep(1.3 * self._lease if slow else self._random.choice((0.0, 0.0, 0.005, 0.03)))
        failing = number % 7 == 0 and message.attempts_count < number % 4
        self._recorder.note("end", **_ids(message), outcome="nack" if failing else "ack")
        if failing:
            raise RuntimeError(f"attempt {message.attempts_count} of {number}")

    async def plain(self, number: int, message: SqlBrokerMessage) -> int:
        """Answer when done."""
        self._start(number, message)
        await self._work(number, message)
        return number

    async def tx(self, number: int, message: SqlBrokerMessage, connection: SqlConnection) -> int:
        """Write an effect, then work; a failure is to roll the effect back."""
        self._start(number, message)
        await connection.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": number})
        await self._work(number, message)
        return number

    async def once(self, number: int, message: SqlBrokerMessage) -> None:
        """Work without a second chance."""
        self._start(number, message)
        await self._work(number, message)


def _ids(message: SqlBrokerMessage) -> dict[str, int]:
    return {"id": int(message.message_id), "deliveries": message.deliveries_count}


STEPS: dict[str, tuple[str, ...]] = {
    "claim": ("claim", "claim_ordered"),
    "settle": ("settle", "starts.remove_first"),
}


def dying(store: Any, step: str, seed: int) -> None:
    """Kill this process right before or after the n-th claim or settle, of whatever kind."""
    where, _, name = step.partition(" ")
    chosen, calls = random.Random(seed).randint(1, 6), 0

    def patch(owner: Any, method: str) -> None:
        original = getattr(owner, method)

        async def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += bool(arguments[0])
            if where == "before" and calls == chosen:
                os.kill(os.getpid(), signal.SIGKILL)
            result = await original(*arguments, **options)
            found = result[0] if isinstance(result, tuple) else result
            if where == "after" and calls >= chosen and found:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, method, call)

    for path in STEPS[name]:
        *owners, method = path.split(".")
        patch(getattr(store, owners[0]) if owners else store, method)


async def note_stalls(recorder: Recorder, limit: float) -> None:
    """Note when this process does not come to its turn for more than `limit` seconds."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.05)
        if time.monotonic() - before > limit:
            recorder.note("stalled")


async def work(broker: SqlBroker, recorder: Recorder, lease: float) -> None:
    """Run until SIGTERM."""
    watch = asyncio.create_task(note_stalls(recorder, lease / 3))
    await FastStream(broker, logger=None).run()
    watch.cancel()


def run(url: str, folder: Path, options: dict[str, Any]) -> None:
    """Work until SIGTERM."""
    given = dict(options)
    seed, die, defect = given.pop("seed", 0), given.pop("die", None), given.pop("defect", None)
    recorder = Recorder(folder)
    logger = logging.getLogger("faults")
    logger.addHandler(Reports(recorder))
    logger.propagate = False
    sizes = {"pool_size": given.pop("pool_size", 10), "max_overflow": given.pop("max_overflow", 5)}
    engine = create_async_engine(url, **({} if url.startswith("sqlite") else sizes))
    timeout = given.pop("statement_timeout", 3.0)
    broker = SqlBroker(engine, logger=logger, statement_timeout=timeout, graceful_timeout=15.0)
    # Handlers end within the graceful timeout, however long the lease.
    lease, one_writer = given.pop("slow", given["release_stuck_timeout"]), url.startswith("sqlite")
    handlers = Handlers(recorder, seed, lease, one_writer=one_writer)
    used: dict[str, Any] = {
        "max_workers": 3, "fetch_batch_size": 20, "flush_batch_size": 10, "flush_interval": 0.02,
        "max_fetch_interval": 0.3, "release_stuck_interval": 0.5,
        "retry_strategy": ConstantRetryStrategy(delay_seconds=0.02, max_attempts=3), "max_deliveries": 30,
        **given,
    }  # fmt: skip
    broker.subscriber("plain", **used)(broker.publisher("out")(handlers.plain))
    broker.subscriber("tx", **used, transactional=True)(broker.publisher("out")(handlers.tx))
    broker.subscriber("ordered", **used, ordered=True)(broker.publisher("out")(handlers.plain))
    used.pop("retry_strategy")
    broker.subscriber("once", **used, ack_policy=AckPolicy.ACK_FIRST)(handlers.once)
    store = broker.config.broker_config.store
    if die:
        dying(store, die, seed)
    if defect:
        defects.plant(defect, store)
    asyncio.run(work(broker, recorder, given["release_stuck_timeout"]))


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
