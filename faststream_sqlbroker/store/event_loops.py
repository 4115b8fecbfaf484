"""State that outlives an event loop.

A broker may be used in one `asyncio.run` after another, whether it was stopped or not.
"""

import asyncio
from typing import Literal
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool
from typing_extensions import override


class LoopSemaphore(asyncio.Semaphore):
    """A semaphore with a separate count for each event loop.

    asyncio's own semaphore can be used only in the first event loop in which a task waited for it.
    """

    def __init__(self, value: int = 1) -> None:
        """Let `value` tasks of each event loop in; 1 makes it a lock."""
        super().__init__(value)
        self._most = value
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    @property
    def _here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            found = self._by_loop[loop] = asyncio.Semaphore(self._most)
        return found

    @override
    def locked(self) -> bool:
        return self._here.locked()

    @override
    async def acquire(self) -> Literal[True]:
        return await self._here.acquire()

    @override
    def release(self) -> None:
        self._here.release()


class LoopPools:
    """Replaces pools whose connections belong to an event loop that has ended.

    Such a connection can neither be read nor closed. A listener records the event loop in which
    connections are opened, also those that the application opens. Connections of aiosqlite work in
    every event loop.
    """

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        self._loops: WeakKeyDictionary[Pool, asyncio.AbstractEventLoop] = WeakKeyDictionary()

    def watch(self, engine: Engine) -> None:
        """Record in which event loop connections of `engine` are opened."""
        if engine.dialect.name != "sqlite":
            self._engines.append(engine)
            event.listen(engine, "connect", lambda *_: self._note(engine))

    def refresh(self) -> None:
        """Give an empty pool to each engine whose connections belong to an ended event loop."""
        for engine in self._engines:
            loop = self._loops.get(engine.pool)
            if loop is not None and loop.is_closed():
                engine.dispose(close=False)

    def _note(self, engine: Engine) -> None:
        self._loops[engine.pool] = asyncio.get_running_loop()
