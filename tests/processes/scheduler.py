"""A process that fires a schedule every second, for the tests: python -m tests.processes.scheduler
URL FOLDER.

Each call of its function is a line in FOLDER/<process id>, written at once: it survives SIGKILL.
"""

import asyncio
import os
import sys
from datetime import datetime
from pathlib import Path

from faststream import FastStream
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow.tasks import schedules


def main() -> None:
    """Run until SIGTERM."""
    # What a killed one has begun is soon taken over; none that stands still publishes twice.
    schedules.LEASE = 2.0
    url, folder = sys.argv[1:]
    file = os.open(Path(folder) / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    broker = SqlBroker(create_async_engine(url), logger=None)

    @broker.schedule("* * * * * *", queue="q", missed="all", name="function")
    async def make(at: datetime) -> str:
        os.write(file, f"{at.isoformat()}\n".encode())
        await asyncio.sleep(0.3)  # a kill often hits here
        return at.isoformat()

    broker.publish_on_schedule("plain", "* * * * * *", "q", "x", missed="all")
    asyncio.run(FastStream(broker, logger=None).run())


if __name__ == "__main__":
    main()
