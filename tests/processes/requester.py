"""A process that answers requests, or makes some:
python -m tests.processes.requester URL FOLDER WHAT [COUNT].

`answer`: answer each body with the body and the process id, until killed. `hang`: note the body and
never answer. `ask`: make COUNT
requests at once, and fail if one gets the reply of another. `ask in vain`: the same, to a queue
without a handler. Each body that is noted is a line in FOLDER/<process id>.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from tests.processes.patience import note_listening

TIMEOUT = 120.0
IN_VAIN = 600.0
"""Seconds for which requests wait that get no reply."""


async def serve(broker: SqlBroker, folder: str, file: int, what: str) -> None:
    """Until SIGTERM."""

    @broker.subscriber("q", max_workers=10, max_fetch_interval=0.1)
    async def answer(body: int) -> dict[str, Any]:
        os.write(file, f"{body}\n".encode())
        if what == "hang":
            await asyncio.Event().wait()
        return {"body": body, "process": os.getpid()}

    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    note_listening(folder)
    async with broker:
        await broker.start()
        await end.wait()


async def ask(broker: SqlBroker, file: int, what: str, count: int) -> None:
    """All at the same time."""
    queue, timeout = ("q", TIMEOUT) if what == "ask" else ("unanswered", IN_VAIN)

    async def one(body: int) -> None:
        reply = await broker.request(body, queue, timeout=timeout, correlation_id="same")
        assert (await reply.decode())["body"] == body

    async with broker, asyncio.TaskGroup() as group:
        for body in range(count):
            group.create_task(one(body))
        await asyncio.sleep(0)
        os.write(file, b"0\n")


async def run() -> None:
    """As the arguments say."""
    url, folder, what, *rest = sys.argv[1:]
    engine = create_async_engine(url)
    file = os.open(Path(folder) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    broker = SqlBroker(engine, logger=None)
    if what.startswith("ask"):
        await ask(broker, file, what, int(rest[0]))
    else:
        await serve(broker, folder, file, what)
    await engine.dispose()


def main() -> None:
    """Until it is done, or killed."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
