"""FastStream's MultiLock by a counter: the same answers."""

import asyncio

import pytest

from faststream_sqlbroker.adapter.endpoints import MultiLock
from faststream_sqlbroker.subscriber.running_calls import RunningCalls


@pytest.mark.parametrize("kind", [MultiLock, RunningCalls])
async def test_running_calls_are_counted(kind: type[MultiLock]) -> None:
    lock = kind()
    assert (lock.qsize, lock.empty) == (0, True)
    with lock, lock:
        lock.acquire()
        assert (lock.qsize, lock.empty) == (3, False)
        lock.release()
    assert (lock.qsize, lock.empty) == (0, True)
    lock.release()
    assert lock.qsize == 0, "one too many is no error"


@pytest.mark.parametrize("kind", [MultiLock, RunningCalls])
async def test_a_wait_ends_when_no_call_runs(kind: type[MultiLock]) -> None:
    lock = kind()
    await lock.wait_release(5)
    lock.acquire()
    waiting = asyncio.create_task(lock.wait_release(5))
    await asyncio.sleep(0)
    assert not waiting.done()
    lock.release()
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize("kind", [MultiLock, RunningCalls])
async def test_a_wait_ends_at_its_time_limit(kind: type[MultiLock]) -> None:
    lock = kind()
    lock.acquire()
    async with asyncio.timeout(60):
        await lock.wait_release(0.05)
    await lock.wait_release()
    assert lock.qsize == 1
