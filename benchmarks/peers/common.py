"""The scenarios of the peers, run by a thin adapter of each of them: see `Peer`.

Standard library only. Importing this puts the benchmarks folder first in sys.path, where `measure`
is.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import Clock, answer, body, clock, compact, percentile

__all__ = ["QUEUE", "Peer", "answer", "body", "compact", "scenarios"]

QUEUE = "bench"
BATCH = 1_000
"""Messages of a transaction and of a batch."""
WARM_UP = 100
"""Messages that one publisher publishes before the clock."""
FIRST = 10
"""Messages before those whose latency counts."""
PATIENCE = 60.0
"""Seconds that anything may take beyond what its number of messages explains."""
SLOWEST = 50
"""Messages a second below which a consumer is given up."""


class Publisher(Protocol):
    """Publishes the messages of the given numbers in the peer's own ways."""

    async def single(self, n: int) -> None:
        """One message, committed when it returns."""

    async def transaction(self, numbers: Sequence[int]) -> None:
        """Each by a call of its own, all in one transaction of the caller's."""

    async def bulk(self, numbers: Sequence[int]) -> None:
        """All in one call, committed when it returns."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a peer's script provides."""

    create: Callable[[str], Awaitable[None]]
    """Create its tables in the database of the URL."""
    settle: Callable[[str], Awaitable[None]]
    """Vacuum and analyze them, where there is such a thing."""
    waiting: Callable[[str], Awaitable[int]]
    """How many messages are in its queue table, done ones not counted."""
    publisher: Callable[[str, int], AbstractAsyncContextManager[Publisher]]
    """Open a publisher of at most so many connections."""
    consumer: Callable[..., AbstractAsyncContextManager[None]]
    """Consume, calling `take` with each message's number, until left; a module's function, others
    import it.

    Called with (url, take, idle=..., archive=...): `idle` asks for settings of low latency, not of
    throughput.
    """


def scenarios(peer: Peer) -> dict[str, Callable[..., dict[str, Any]]]:
    """Everything that can be measured of a peer, by name, as `measure.answer` wants it."""
    offered = (
        consume,
        publish_single,
        publish_concurrent,
        publish_in_transaction,
        publish_bulk,
        latency,
    )
    return {scenario.__name__: partial(scenario, peer) for scenario in offered}


def consume(peer: Peer, url: str, count: int, archive: bool = True) -> dict[str, Any]:
    """A backlog: from starting the consumer to its having stopped with everything flushed."""
    return asyncio.run(_consume(peer, url, count, archive))


def publish_single(peer: Peer, url: str, count: int) -> dict[str, Any]:
    """One coroutine, each message committed before the next."""
    return publish_concurrent(peer, url, count, tasks=1)


def publish_concurrent(peer: Peer, url: str, count: int, tasks: int = 20) -> dict[str, Any]:
    """Several coroutines, each message committed by itself."""

    async def work(publisher: Publisher, numbers: Sequence[int]) -> None:
        rest = iter(numbers)
        await asyncio.gather(*(_singles(publisher, rest) for _ in range(tasks)))

    return asyncio.run(_publish(peer, url, count, work, WARM_UP * tasks, tasks))


def publish_in_transaction(peer: Peer, url: str, count: int) -> dict[str, Any]:
    """Single calls in transactions of the caller's."""

    async def work(publisher: Publisher, numbers: Sequence[int]) -> None:
        for batch in _batches(numbers):
            await publisher.transaction(batch)

    return asyncio.run(_publish(peer, url, count, work, WARM_UP))


def publish_bulk(peer: Peer, url: str, count: int) -> dict[str, Any]:
    """Batches, each committed by itself."""

    async def work(publisher: Publisher, numbers: Sequence[int]) -> None:
        for batch in _batches(numbers):
            await publisher.bulk(batch)

    return asyncio.run(_publish(peer, url, count, work, BATCH))


def latency(peer: Peer, url: str, count: int, pause: float) -> dict[str, Any]:
    """From a publish call's return to the handler's entry in another process, `pause` seconds
    between messages."""
    asyncio.run(peer.create(url))
    with _other_process(_listen, peer.consumer, url, count, pause) as pipe:
        returned, (arrived, seconds, cpu) = asyncio.run(_trickle(peer, url, count, pause, pipe))
    _check([n for n, _ in arrived], FIRST + count, asyncio.run(peer.waiting(url)))
    times = [moment - returned[n] for n, moment in arrived if n >= FIRST]
    shares = {f"p{share}": percentile(times, share / 100) for share in (50, 95, 99)}
    return {"count": len(times), **shares, "seconds": seconds, "cpu": cpu}


def _batches(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH))


async def _singles(publisher: Publisher, numbers: Iterable[int]) -> None:
    """One of several tasks that publish what is left of `numbers`."""
    for n in numbers:
        await publisher.single(n)


def _result(count: int, measured: Clock) -> dict[str, Any]:
    return {"count": count, "seconds": measured.seconds, "cpu": measured.cpu}


def _check(handled: list[int], count: int, left: int) -> None:
    """Raise unless each of 0..count-1 was handled once and nothing is left."""
    different = set(handled)
    if len(handled) != count or different != set(range(count)):
        raise RuntimeError(f"handled {len(handled)} times {len(different)} of {count} messages")
    if left:
        raise RuntimeError(f"{left} rows are left in the queue table")


async def _publish(
    peer: Peer,
    url: str,
    count: int,
    work: Callable[[Publisher, Sequence[int]], Awaitable[None]],
    warm_up: int,
    connections: int = 1,
) -> dict[str, Any]:
    """Publish `count` messages by `work`, after `warm_up` others."""
    await peer.create(url)
    async with peer.publisher(url, connections) as publisher:
        await work(publisher, range(warm_up))
        before = await peer.waiting(url)
        with clock() as measured:
            await work(publisher, range(count))
        published = await peer.waiting(url) - before
    if published != count or before != warm_up:
        raise RuntimeError(
            f"{published} rows of {count} messages, {before} of {warm_up} to warm up"
        )
    return _result(count, measured)


async def _consume(peer: Peer, url: str, count: int, archive: bool) -> dict[str, Any]:
    await peer.create(url)
    async with peer.publisher(url, 1) as publisher:
        for batch in _batches(range(count)):
            await publisher.bulk(batch)
    await peer.settle(url)
    handled: list[int] = []
    done = asyncio.Event()

    def take(n: int) -> None:
        handled.append(n)
        if len(handled) == count:
            done.set()

    with clock() as measured:
        async with peer.consumer(url, take, idle=False, archive=archive):
            await _wait(done, count / SLOWEST, handled)
    _check(handled, count, await peer.waiting(url))
    return _result(count, measured)


async def _wait(event: asyncio.Event, seconds: float, handled: Sequence[Any]) -> None:
    try:
        await asyncio.wait_for(event.wait(), PATIENCE + seconds)
    except TimeoutError:
        raise RuntimeError(f"gave up after {len(handled)} messages") from None


async def _trickle(
    peer: Peer, url: str, count: int, pause: float, pipe: Any
) -> tuple[dict[int, float], Any]:
    """Publish one by one; when each call returned, and what the consumer reports."""
    returned = {}

    async def publish(publisher: Publisher, numbers: Iterable[int]) -> None:
        for n in numbers:
            await publisher.single(n)
            returned[n] = time.monotonic()
            await asyncio.sleep(pause)

    async with peer.publisher(url, 1) as publisher:
        await _receive(pipe)
        await publish(publisher, range(FIRST))
        await _receive(pipe)
        await publish(publisher, range(FIRST, FIRST + count))
        return returned, await _receive(pipe)


async def _receive(pipe: Any) -> Any:
    """The other process's next word."""
    deadline = time.monotonic() + 2 * PATIENCE
    while not pipe.poll():
        if time.monotonic() > deadline:
            raise RuntimeError("the consumer's process does not answer")
        await asyncio.sleep(0.01)
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("the consumer's process ended") from None


@contextmanager
def _other_process(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run `work(*arguments, pipe)` in a new process; gives our end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(PATIENCE)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _listen(
    consumer: Callable[..., AbstractAsyncContextManager[None]],
    url: str,
    count: int,
    pause: float,
    pipe: Any,
) -> None:
    """The consumer's process: reports its start, when it is warm, then what arrived when."""
    asyncio.run(_listening(consumer, url, count, pause, pipe))


async def _listening(consumer: Any, url: str, count: int, pause: float, pipe: Any) -> None:
    arrived: list[tuple[int, float]] = []
    warm = asyncio.Event()
    done = asyncio.Event()

    def take(n: int) -> None:
        arrived.append((n, time.monotonic()))
        if len(arrived) == FIRST:
            warm.set()
        elif len(arrived) == FIRST + count:
            done.set()

    async with consumer(url, take, idle=True, archive=True):
        pipe.send("started")
        await _wait(warm, FIRST * pause, arrived)
        with clock() as measured:
            pipe.send("warm")
            await _wait(done, count * (pause + 1), arrived)
    pipe.send((arrived, measured.seconds, measured.cpu))
