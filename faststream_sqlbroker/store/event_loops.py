"""What outlives an event loop: a broker may be used in one `asyncio.run` after another, whether it
was stopped or not.
"""

import asyncio
from typing import Literal
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool
from typing_extensions import override


class LoopSemaphore(asyncio.Semaphore):
    """A semaphore of its own for each event loop: asyncio's is bound to the first in which somebody
    had to wait.
    """

    def __init__(self, value: int = 1) -> None:
        """Let `value` of each event loop in; 1 is a lock."""
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
    """Replaces the pools whose connections belong to an event loop that has ended: nothing can be
    read or closed there.

    Connections are noted when they are opened, by whomever. Those of aiosqlite work in every event
    loop.
    """

    def __init__(self) -> None:
        """No pool is known yet."""
        self._engines: list[Engine] = []
        self._loops: WeakKeyDictionary[Pool, asyncio.AbstractEventLoop] = WeakKeyDictionary()

    def watch(self, engine: Engine) -> None:
        """Note in which event loop the connections of `engine` are opened."""
        if engine.dialect.name != "sqlite":
            self._engines.append(engine)
            event.listen(engine, "connect", lambda *_: self._note(engine))

    def refresh(self) -> None:
        """Give an empty pool to each engine for whose connections the event loop has ended."""
        for engine in self._engines:
            loop = self._loops.get(engine.pool)
            if loop is not None and loop.is_closed():
                engine.dispose(close=False)

    def _note(self, engine: Engine) -> None:
        self._loops[engine.pool] = asyncio.get_running_loop()
