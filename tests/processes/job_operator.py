"""A process that works on a job of an operator until it is killed: python -m
tests.processes.job_operator URL FOLDER JOB.

Its batches are small, and each waits before its COMMIT, so that a kill mostly strikes inside one.
"""

import asyncio
import sys
import time
from typing import Any

from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.database.bulk import store as jobs
from faststream_sqlbroker.database.parts import audit

BATCH = 5
WAIT = 0.03
LAST = 5
"""The batch that never ends: however late the kill comes, it finds the job unfinished."""


async def run() -> None:
    """Until the job has ended."""
    url, _folder, job_id = sys.argv[1:]
    jobs.BATCH_SIZE = BATCH
    save = audit.save_job
    batches = 0

    def save_late(*arguments: Any) -> None:
        nonlocal batches
        save(*arguments)
        batches += 1
        time.sleep(WAIT if batches < LAST else 600)

    audit.save_job = save_late
    engine = create_async_engine(url)
    await SqlBroker(engine, logger=None).admin.wait_for_job(job_id)
    await engine.dispose()


def main() -> None:
    """Until it is done, or killed."""
    asyncio.run(run())


if __name__ == "__main__":
    main()
