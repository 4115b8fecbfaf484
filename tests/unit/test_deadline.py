"""One timer bounds many statements, and a cancellation of the caller is never taken for it."""

import asyncio
from unittest.mock import patch

import pytest

from faststream_sqlbroker.database.messages.publish_coalescer import Deadline
from tests.helpers import eventually

LONG = 3600.0


def here() -> "asyncio.Task[object]":
    """The current task."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def test_what_takes_too_long_is_cancelled_and_its_task_goes_on() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop)
    for _ in range(2):
        deadline.start(0.001)
        with pytest.raises(asyncio.CancelledError):
            await loop.create_future()
        assert deadline.end()
        assert not here().cancelling()


async def test_a_cancellation_of_the_caller_stays_one() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop)
    deadline.start(LONG)
    loop.call_soon(here().cancel)
    with pytest.raises(asyncio.CancelledError):
        await loop.create_future()
    assert not deadline.end()
    assert here().uncancel() == 0
    deadline.close()


async def test_a_cancellation_of_the_caller_at_the_same_time_stays_one() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop)
    deadline.start(0.0)
    loop.call_soon(here().cancel)
    with pytest.raises(asyncio.CancelledError):
        await loop.create_future()
    while here().cancelling() < 2:  # the timer may come second
        with pytest.raises(asyncio.CancelledError):
            await loop.create_future()
    assert not deadline.end()
    assert here().uncancel() == 0


async def test_one_timer_serves_many_and_a_shorter_time_gets_its_own() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop)
    with patch.object(loop, "call_at", wraps=loop.call_at) as call_at:
        for _ in range(100):
            deadline.start(LONG)
            assert not deadline.end()
        assert call_at.call_count == 1
        deadline.start(0.001)
        with pytest.raises(asyncio.CancelledError):
            await loop.create_future()
        assert deadline.end()
        assert call_at.call_count == 2


async def test_what_has_ended_in_time_is_not_cancelled() -> None:
    deadline = Deadline(asyncio.get_running_loop())
    deadline.start(0.001)
    assert not deadline.end()

    async def timer_has_ended() -> bool:
        return deadline._timer is None

    await eventually(timer_has_ended)
    assert not here().cancelling()


async def test_a_later_statement_gets_all_of_its_time() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(loop)
    deadline.start(0.001)
    deadline.end()
    deadline.start(LONG)  # the first one's timer is still set

    async def timer_is_set_anew() -> bool:
        return deadline._timer is not None and deadline._timer.when() > loop.time() + LONG / 2

    await eventually(timer_is_set_anew)
    assert not here().cancelling()
    assert not deadline.end()
    deadline.close()
