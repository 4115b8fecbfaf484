"""What waits for workers: who waits for it is woken in order, and no item is forgotten."""

import asyncio

from faststream_sqlbroker.flow.deliver.prefetch import Buffer


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_for_what_comes_is_woken_first_and_takes_nothing() -> None:
    buffer = Buffer[int]()
    getter = asyncio.create_task(buffer.get())
    await turns()
    watcher = asyncio.create_task(buffer.wait_nonempty())
    await turns()
    buffer.put_nowait(1)
    await turns()
    assert watcher.done()
    assert not getter.done()
    assert list(buffer.items) == [1]
    buffer.put_nowait(2)
    assert await getter == 1


async def test_several_items_wake_as_many() -> None:
    buffer = Buffer[int]()
    getters = [asyncio.create_task(buffer.get()) for _ in range(3)]
    watcher = asyncio.create_task(buffer.wait_nonempty())
    await turns()
    buffer.extend([1, 2, 3])
    await turns()
    assert watcher.done()
    assert [task.result() for task in getters if task.done()] == [1, 2]
    buffer.put_nowait(4)
    assert sorted(await asyncio.gather(*getters)) == [1, 2, 3]


async def test_an_item_for_a_cancelled_watcher_goes_to_a_getter() -> None:
    buffer = Buffer[int]()
    watcher = asyncio.create_task(buffer.wait_nonempty())
    getter = asyncio.create_task(buffer.get())
    await turns()
    buffer.put_nowait(1)
    watcher.cancel()
    await asyncio.wait((watcher,))
    assert await getter == 1


async def test_an_interrupt_ends_every_wait_for_what_comes_and_no_other() -> None:
    buffer = Buffer[int]()
    getter = asyncio.create_task(buffer.get())
    watchers = [asyncio.create_task(buffer.wait_nonempty()) for _ in range(2)]
    await turns()
    buffer.interrupt()
    await asyncio.gather(*watchers)
    assert not getter.done()
    buffer.put_nowait(1)
    assert await getter == 1
