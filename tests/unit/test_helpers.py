"""What tests measure limits with."""

import asyncio
import time

from tests.helpers import Awake


async def test_a_pause_of_the_process_is_no_time_that_was_spent() -> None:
    async with Awake() as awake:
        await asyncio.sleep(0)
        time.sleep(0.5)  # as if the machine had put it aside
        await asyncio.sleep(0)
    assert 0 < awake.seconds < 0.25


async def test_a_wait_is_time_that_was_spent() -> None:
    async with Awake() as awake:
        while awake.seconds < 0.1:
            await asyncio.sleep(0.01)
