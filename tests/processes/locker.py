"""A process that locks, for the tests: python -m tests.processes.locker URL FOLDER WHAT [COUNT].

`count`: COUNT times under one lock, read the number in FOLDER/number, wait a moment, write the next
one; each fence is a line in FOLDER/<process id>. `hold`: note the fence and keep the lock until
killed; the lease is COUNT seconds.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.clock import RealTime

FACTOR = 100


class Rushing(RealTime):
    """A hundred times as fast as the real time: a lease of ten minutes is renewed after two
    seconds."""

    @staticmethod
    def monotonic() -> float:  # type: ignore[override]
        """The process's time."""
        return FACTOR * time.monotonic()

    @staticmethod
    def timeout(seconds: float | None) -> asyncio.Timeout:  # type: ignore[override]
        """As `asyncio.timeout`."""
        return asyncio.timeout(None if seconds is None else seconds / FACTOR)


async def count(broker: SqlBroker, folder: Path, file: int, times: int) -> None:
    """Nothing but the lock keeps two processes from writing the same number."""
    number = folder / "number"
    for _ in range(times):
        async with broker.lock("number", lease="10m") as lock:
            seen = int(number.read_text())
            await asyncio.sleep(0.001)
            number.write_text(str(seen + 1))
            os.write(file, f"{lock.fence}\n".encode())


async def hold(broker: SqlBroker, _folder: Path, file: int, lease: int) -> None:
    """For ever."""
    broker._clock.use(Rushing())
    async with broker.lock("number", lease=lease) as lock:
        os.write(file, f"{lock.fence}\n".encode())
        await asyncio.Event().wait()


async def run() -> None:
    """As the arguments say."""
    url, folder, what, *rest = sys.argv[1:]
    engine = create_async_engine(url)
    file = os.open(Path(folder) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    work = {"count": count, "hold": hold}[what]
    await work(SqlBroker(engine, logger=None), Path(folder), file, int(rest[0]) if rest else 0)
    await engine.dispose()


def main() -> None:
    """Until it is done, or killed."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
