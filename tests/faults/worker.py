"""A worker for the fault machine: python -m tests.faults.worker URL FOLDER [OPTIONS as JSON].

Queues: `plain`, `batch`, `tx` (transactional) and `ordered` answer to `out` and sometimes fail;
`once` is ACK_FIRST; those of `plan.LIMITED` have one budget; the transactions of `catching` and
`ending` come to harm. Options: seed;
`queues`; lease and others of the subscribers; `die`: kill this process in the middle of a step;
`defect`: one that is planted on purpose (`tests.faults.defects`); `health`: note what `ping` says;
`processor`: whether a process that others keep from running is excused (`note_stalls`);
`pipeline`: the one that handlers run in; `refusing` and `large`: see `Manners`; `broker`: options
of the broker.
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
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import Concurrency, ConstantRetryStrategy, SqlBroker
from faststream_sqlbroker.subscriber.pipeline.fingerprints import COMPILED, VARIABLE
from tests.faults import defects, plan
from tests.faults.features import FEATURES, subscribe_all
from tests.faults.handlers import Manners, TransactionHandlers
from tests.faults.history import Recorder

LOST = ("lease lost", "are delivered again: the handler's work")
UNKNOWN = (
    "settle unknown",
    "is not confirmed",
    "could not be committed",
    "did not answer whether",
    "could not be written while stopping",
)
"""What the broker says of a delivery that is not its own any more, and of one that may or must
start again after an ack."""


class Reports(logging.Handler):
    """Records what the broker says of lost leases and unknown settles."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Note the messages that a report is about."""
        said = record.getMessage()
        self._recorder.note("said", text=said)
        unknown = any(part in said for part in UNKNOWN)
        lost = not unknown and any(part in said for part in LOST)
        if not lost and not unknown:
            return
        delivery = re.search(r"delivery (\d+)", said)
        several = re.search(r"messages \[([\d, ]+)\]", said)
        if lost and not delivery and not several:
            # An old outcome of a delivery whose loss was reported; the message may have come back.
            return
        extra = {"deliveries": int(delivery[1])} if delivery else {}
        for message_id in several[1].split(",") if several else [getattr(record, "message_id", "")]:
            if message_id:
                self._recorder.note("report", id=int(message_id), lost=lost, text=said, **extra)


STEPS: dict[str, tuple[str, ...]] = {
    "claim": ("claim", "claim_ordered"),
    "settle": ("settle", "ack_first_starts.remove_first"),
}


def dying(store: Any, step: str, seed: int) -> None:
    """Kill this process right before or after the n-th claim or settle, of whatever kind."""
    where, _, name = step.partition(" ")
    chosen = random.Random(seed).randint(1, 6)
    calls = 0

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


async def note_stalls(recorder: Recorder, lease: float, *, processor: bool) -> None:
    """Note when this process does not come to its turn in time to renew a lease of `lease` seconds.

    That is a third of it at once or, with `processor`, a fifth of it in half of it without a
    processor to run on.
    """
    waited = waited_for_processor()
    since = time.monotonic()
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.05)
        now = time.monotonic()
        if now - before > lease / 3:
            recorder.note("stalled", since=before)
        if now - since > lease / 2:
            earlier, waited = waited, waited_for_processor()
            if processor and waited - earlier > lease / 5:
                recorder.note("stalled", since=since)
            since = now


def waited_for_processor() -> float:
    """Seconds that this process could have run and others ran, so far; 0 where the system does not
    count them."""
    counts = Path("/proc/self/schedstat")
    return int(counts.read_text().split()[1]) / 1e9 if counts.exists() else 0.0


async def note_health(recorder: Recorder, broker: SqlBroker, noted: asyncio.Event) -> None:
    """Note each change of what `ping` says; `noted` is set when something is noted."""
    last = None
    while True:
        # A database that stands still is waited for: that is no refusal.
        healthy = await broker.ping(30.0)
        if healthy is not last:
            recorder.note("health", healthy=healthy)
            last = healthy
            noted.set()
        await asyncio.sleep(0.1)


async def work(
    broker: SqlBroker, recorder: Recorder, lease: float, *, health: bool, processor: bool
) -> None:
    """Run until SIGTERM."""
    watches = [asyncio.create_task(note_stalls(recorder, lease, processor=processor))]
    noted = asyncio.Event()
    if health:
        watches.append(asyncio.create_task(note_health(recorder, broker, noted)))
    try:
        await FastStream(broker, logger=None).run()
    finally:
        if health:  # one that cannot start says how it is, too
            await noted.wait()
    for watch in watches:
        watch.cancel()


def subscribe(
    broker: SqlBroker, handlers: TransactionHandlers, queues: set[str], options: Any
) -> None:
    """A subscriber for each of `queues`."""
    retry = {"retry_strategy": ConstantRetryStrategy(delay_seconds=0.02, max_attempts=3)}
    subscribers: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (handlers.plain, retry),
        "batch": (handlers.batch, {**retry, "batch": True, "fetch_batch_size": 6}),
        "tx": (handlers.tx, {**retry, "transactional": True}),
        "ordered": (handlers.plain, {**retry, "ordered": True}),
        "once": (handlers.once, {"ack_policy": AckPolicy.ACK_FIRST}),
        "catching": (handlers.catching, {**retry, "transactional": True}),
        "ending": (handlers.ending, {**retry, "transactional": True}),
    }
    budget = {**retry, "policies": [Concurrency(1, scope=plan.BUDGET)]}
    subscribers |= dict.fromkeys(plan.LIMITED, (handlers.plain, budget))
    limits = {queue: {"concurrency": 1, "scope": plan.BUDGET} for queue in plan.LIMITED}
    if FEATURES[0] in queues:
        subscribe_all(broker, handlers, {**options, **retry})
    for queue in sorted(queues - set(FEATURES)):
        handler, more = subscribers[queue]
        answering = handler if queue == "once" else broker.publisher("out")(handler)
        handlers.subscribe(queue, {**options, **more}, **limits.get(queue, {}))
        broker.subscriber(queue, **{**options, **more})(answering)


def run(url: str, folder: Path, options: dict[str, Any]) -> None:
    """Work until SIGTERM."""
    given = dict(options)
    seed = given.pop("seed", 0)
    die = given.pop("die", None)
    defect = given.pop("defect", None)
    queues = set(given.pop("queues"))
    health = given.pop("health", False)
    processor = given.pop("processor", True)
    # A fork has the environment of the process that it is forked from.
    os.environ[VARIABLE] = given.pop("pipeline", COMPILED)
    recorder = Recorder(folder)
    logger = logging.getLogger("faults")
    logger.addHandler(Reports(recorder))
    logger.propagate = False
    sizes = {"pool_size": given.pop("pool_size", 10), "max_overflow": given.pop("max_overflow", 5)}
    engine = create_async_engine(url, **({} if url.startswith("sqlite") else sizes))
    timeout = given.pop("statement_timeout", 3.0)
    more = given.pop("broker", {})
    broker = SqlBroker(
        engine, logger=logger, statement_timeout=timeout, graceful_timeout=60.0, **more
    )
    manners = Manners(
        # Handlers end within the graceful timeout, however long the lease.
        lease=given.pop("slow", given["release_stuck_timeout"]),
        one_writer=url.startswith("sqlite"),
        refusing=given.pop("refusing", False),
        large=given.pop("large", 0),
    )
    handlers = TransactionHandlers(broker, recorder, seed, manners)
    used: dict[str, Any] = {
        "max_workers": 3,
        "fetch_batch_size": 20,
        "flush_batch_size": 10,
        "flush_interval": 0.02,
        "max_fetch_interval": 0.3,
        "release_stuck_interval": 0.5,
        "max_deliveries": 30,
        **given,
    }
    subscribe(broker, handlers, queues, used)
    store = broker.config.broker_config.store
    if die:
        dying(store, die, seed)
    if defect:
        defects.plant(defect, store)
    asyncio.run(
        work(broker, recorder, given["release_stuck_timeout"], health=health, processor=processor)
    )


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
