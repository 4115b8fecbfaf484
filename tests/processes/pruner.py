"""A process that prunes until it is killed: python -m tests.processes.pruner URL FOLDER.

Its steps are small, and each waits before its COMMIT, so that a kill mostly strikes inside one.
"""

import asyncio
import sys
import time
from typing import Any

from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import Retention, SqlBroker
from faststream_sqlbroker.database.parts import retention as statements
from faststream_sqlbroker.flow import retention as loop

BATCH = 5
WAIT = 0.03


async def run() -> None:
    """Until it is killed."""
    url = sys.argv[1]
    statements.BATCH = BATCH
    # The lock of a process that was killed is free after a second.
    loop.LEASE = 1.0
    loop.INTERVAL = 0.1
    remove = statements.remove

    def remove_late(*arguments: Any) -> Any:
        step = remove(*arguments)
        time.sleep(WAIT)
        return step

    statements.remove = remove_late
    broker = SqlBroker(create_async_engine(url), logger=None, retention=Retention(completed="1d"))
    await broker.start()
    await asyncio.Event().wait()


def main() -> None:
    """Until it is killed."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
