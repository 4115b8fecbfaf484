"""A consumer next to a process that serves HTTP clients (PostgreSQL): python -m benchmarks.serving
next_to_http '{"url": ..., "count": ..., "clients": ..., "viewers": ...}'."""

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import httpx
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.filling import fill
from benchmarks.measure import answer, body, clock
from benchmarks.ours import BATCH, DEADLINE, QUEUE, engine_of, subscriber_of
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.listening import create_server_config
from faststream_sqlbroker.client import PullConsumer
from faststream_sqlbroker.core.channels import MESSAGE_ID, build_queue_name
from faststream_sqlbroker.http import (
    BasicAuth,
    Channel,
    Channels,
    Consumer,
    Login,
    hash_password,
)
from faststream_sqlbroker.http.server import InnerServer

CHANNEL, CONSUMER, TOKEN = "bench-orders", "billing", "bench-token-0123456789"
VIEWER = "viewer", "bench-password"
PAUSE = 1.0
"""Seconds after which a pull client asks for its next job."""
EVENTS_OF_PAGE = 5
"""Looks of a live page, one each two seconds or so, after which its viewer opens another page."""
JOBS = 10
"""Batches of jobs for the pull clients: more than they end in one measurement."""
PATIENCE = 60.0
"""Seconds for processes to start, and to stop."""
LONGEST_ERROR = 1_500
"""Characters of a process's error that are shown: the harness shows the last 2,000 of all."""


async def _serve(url: str, hashed: str, port: Any, stop: Any) -> None:
    """Serve the channel and the dashboard, as `sqlbroker serve` does."""
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    billing = Channel(token=TOKEN, consumers={CONSUMER: Consumer(type="pull", token=TOKEN)})
    app = broker.asgi(
        BasicAuth([Login(VIEWER[0], "viewer", hashed)]),
        channels=Channels(channels={CHANNEL: billing}),
    )
    await broker.connect()
    config, listener = create_server_config(app, "127.0.0.1", 0, {})
    server = InnerServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    port.value = listener.getsockname()[1]
    while not stop.is_set():
        await asyncio.sleep(0.05)
    server.should_exit = True
    await serving
    await broker.stop()
    await engine.dispose()


def _server(url: str, hashed: str, port: Any, stop: Any) -> None:
    asyncio.run(_serve(url, hashed, port, stop))


async def _pull(url: str, ended: Any, answered: Any, number: int) -> None:
    """Take a job each second, and end it."""
    # As clients come that do not know of each other.
    await asyncio.sleep(PAUSE * number / len(ended))
    async with (
        _client() as http,
        PullConsumer(
            url,
            channel=CHANNEL,
            consumer=CONSUMER,
            channel_token=TOKEN,
            consumer_token=TOKEN,
            http=http,
        ) as consumer,
    ):
        while True:
            taken = await consumer.take_any()
            answered[number] = 1
            if taken is not None:
                await taken.delivered()
                ended[number] += 1
            await asyncio.sleep(PAUSE)


def _client() -> httpx.AsyncClient:
    """A client with connections of its own.

    In one pool for all of them, httpx would look at each connection for each request. No TLS is
    used, so none is set up.
    """
    return httpx.AsyncClient(timeout=PATIENCE, verify=False)


async def _view(url: str, answered: Any, number: int) -> None:
    """Keep a page of the dashboard open, and open another one now and then."""
    async with _client() as http:
        await _watch(http, url, answered, number)


async def _watch(http: httpx.AsyncClient, url: str, answered: Any, number: int) -> None:
    while True:
        page = await http.get(f"{url}/ui/queues", auth=VIEWER)
        page.raise_for_status()
        async with http.stream("GET", f"{url}/ui/live", auth=VIEWER) as news:
            news.raise_for_status()
            seen = 0
            async for line in news.aiter_lines():
                if line.startswith("data: "):
                    answered[number] = 1
                    seen += 1
                if seen == EVENTS_OF_PAGE:
                    break


async def _ask(port: int, ended: Any, answered: Any, stop: Any) -> None:
    """All clients; one that fails ends the others."""
    url = f"http://127.0.0.1:{port}"

    async def until_stopped() -> None:
        while not stop.is_set():
            await asyncio.sleep(0.05)

    count = len(ended)
    clients = [_pull(url, ended, answered, n) for n in range(count)]
    clients += [_view(url, answered, n) for n in range(count, len(answered))]
    tasks = [asyncio.create_task(each) for each in (until_stopped(), *clients)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _clients(port: int, ended: Any, answered: Any, stop: Any) -> None:
    asyncio.run(_ask(port, ended, answered, stop))


def _kept(target: Callable[..., None], errors: Any, *arguments: Any) -> None:
    """Run in another process; what it raises is kept for the one that has started it."""
    try:
        target(*arguments)
    except BaseException:
        errors.put(traceback.format_exc()[-LONGEST_ERROR:])
        raise


class Load:
    """The processes next to the consumer: the server, and all of its clients."""

    def __init__(self, url: str, clients: int, viewers: int) -> None:
        """None of them run yet."""
        context = multiprocessing.get_context("spawn")
        self._context = context
        self._url = url
        self._port = context.Value("i", 0, lock=False)
        self.ended = context.Array("q", clients, lock=False)
        """Jobs that each client has ended."""
        self._answered = context.Array("q", clients + viewers, lock=False)
        """1 for each client, then for each viewer, that has seen jobs or a look."""
        self._stops = [context.Event(), context.Event()]
        self._errors = context.SimpleQueue()
        self._processes: list[BaseProcess] = []

    async def begin(self) -> None:
        """Start them, and wait until each client was answered."""
        hashed = hash_password(VIEWER[1])
        self._start(_server, self._url, hashed, self._port, self._stops[0])
        await self._until(lambda: self._port.value > 0)
        self._start(_clients, self._port.value, self.ended, self._answered, self._stops[1])
        await self._until(lambda: all(self._answered) and (any(self.ended) or not len(self.ended)))

    def _start(self, target: Any, *arguments: Any) -> None:
        process = self._context.Process(
            target=_kept,
            name="the server" if target is _server else "the clients",
            args=(target, self._errors, *arguments),
            daemon=True,
        )
        process.start()
        self._processes.append(process)

    async def _until(self, check: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not check():
            self.check()
            if time.monotonic() > deadline:
                left = list(self._answered).count(0)
                raise RuntimeError(f"{left} clients were not answered in {PATIENCE:g} s")
            await asyncio.sleep(0.02)

    def check(self) -> None:
        """Raise RuntimeError with its error if one of them has ended."""
        for process in self._processes:
            if not process.is_alive():
                raise self._failure(process)

    def _failure(self, process: BaseProcess) -> RuntimeError:
        told = []
        while not self._errors.empty():
            told.append(self._errors.get())
        # A process that was killed, as for its memory, keeps no error: its code is all there is.
        why = "\n".join(told) or "it has raised nothing"
        code = process.exitcode
        how = f"did not end in {PATIENCE:g} s" if code is None else f"ended with {code}"
        return RuntimeError(f"{process.name} next to the consumer {how}: {why}")

    def end(self) -> None:
        """The clients first, as the server waits for their answers."""
        for process, stop in reversed(list(zip(self._processes, self._stops, strict=True))):
            stop.set()
            process.join(PATIENCE)
            if process.exitcode != 0:
                raise self._failure(process)


async def _prepare(broker: SqlBroker, engine: AsyncEngine, count: int) -> None:
    await broker.create_tables()
    await fill(engine, 2 * count, QUEUE)
    jobs = build_queue_name(CHANNEL, CONSUMER)
    for number in range(JOBS):
        bodies = [body(number * BATCH + n) for n in range(BATCH)]
        await broker.publish_batch(*bodies, queue=jobs, headers={MESSAGE_ID: str(number)})


async def _next_to_http(url: str, count: int, clients: int, viewers: int) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    seen = list[int]()
    subscriber_of(broker, seen, archive=True, shape="typed")
    await _prepare(broker, engine, count)
    load = Load(url, clients, viewers) if clients or viewers else None
    if load is not None:
        await load.begin()
    before: Sequence[int] = [] if load is None else list(load.ended)
    async with asyncio.timeout(DEADLINE):
        with clock() as c:
            await broker.start()
            while len(seen) < count:
                await asyncio.sleep(0.005)
            handled = len(seen)
    pulled = 0
    if load is not None:
        load.check()
        pulled = sum(load.ended) - sum(before)
    await broker.stop()
    await engine.dispose()
    if load is not None:
        load.end()
    return {"count": handled, "seconds": c.seconds, "cpu": c.cpu, "pulled": pulled}


def next_to_http(url: str, count: int, clients: int, viewers: int) -> dict[str, Any]:
    """Consume while so many pull clients end a job each second, and so many pages are open; with
    none of both no server runs. `pulled` is how many jobs they have ended."""
    return asyncio.run(_next_to_http(url, count, clients, viewers))


if __name__ == "__main__":
    answer({"next_to_http": next_to_http})
