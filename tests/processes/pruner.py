"""A process that prunes until it is killed: python -m tests.processes.pruner URL FOLDER.

Its steps are small, and each waits before its COMMIT, so that a kill mostly strikes inside one.
"""

import asyncio
import sys
import time
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import Retention, SqlBroker
from faststream_sqlbroker.database import retention
from faststream_sqlbroker.flow.tasks import archive_upkeep as loop

BATCH = 5
WAIT = 0.03


async def run() -> None:
    """Until it is killed."""
    engine = create_async_engine(sys.argv[1])
    retention.BATCH = BATCH
    # The lock of a process that was killed is free after a second.
    loop.PRUNE_LEASE = 1.0
    loop.PRUNE_INTERVAL = 0.1

    def wait_with_it(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM message_archive"):
            time.sleep(WAIT)

    event.listen(engine.sync_engine, "after_cursor_execute", wait_with_it)
    broker = SqlBroker(engine, logger=None, retention=Retention(completed="1d"))
    await broker.start()
    await asyncio.Event().wait()


def main() -> None:
    """Until it is killed."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
