"""State that outlives an event loop.

A broker may be used in one `asyncio.run` after another, whether it was stopped or not, but not in
two event loops at the same time.
"""

import asyncio
import threading
from typing import Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.pool import NullPool, Pool
from typing_extensions import override

from faststream_sqlbroker.exceptions import SetupError


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
    """The pools of one broker, and the event loop that each belongs to.

    A connection can neither be read nor closed in another event loop than the one that opened it;
    drivers crash or mix answers up. So the first event loop that uses a pool has it until that loop
    is closed; then the engine gets an empty pool. A listener records where connections are opened,
    as the application opens some, too.
    """

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        # Weak: a loop that is neither closed nor used any more ends, as it does without a broker.
        self._loops: WeakKeyDictionary[Pool, ReferenceType[asyncio.AbstractEventLoop]] = (
            WeakKeyDictionary()
        )
        self._taking = threading.Lock()
        self._last: ReferenceType[asyncio.AbstractEventLoop] | None = None
        """The event loop that has taken a pool last; of another one `refuse_other_loop` asks more.
        """

    def watch(self, engine: Engine) -> None:
        """Record in which event loop connections of `engine` are opened."""
        self._engines.append(engine)
        # A NullPool keeps no connection, and those of aiosqlite work in every event loop: so the
        # application may open some in any.
        if not isinstance(engine.pool, NullPool) and engine.dialect.name != "sqlite":
            event.listen(engine, "connect", lambda *_: self._note(engine))

    def enter(self) -> None:
        """Take the pools for the running event loop. An engine whose connections belong to one that
        has been closed gets an empty pool.

        Raises:
            SetupError: they belong to another event loop, which is still open.
        """
        loop = asyncio.get_running_loop()
        for engine in self._engines:
            if self._owner(engine) is not loop:
                self._take(engine, loop)

    def refuse_other_loop(self) -> None:
        """Only refuse what `enter` refuses."""
        loop = asyncio.get_running_loop()
        if self._last is not None and self._last() is loop:
            return
        for engine in self._engines:
            owner = self._owner(engine)
            if owner is not None and owner is not loop and not owner.is_closed():
                raise SetupError(_OTHER_LOOP)

    def _owner(self, engine: Engine) -> asyncio.AbstractEventLoop | None:
        found = self._loops.get(engine.pool)
        return None if found is None else found()

    def _take(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        # Two threads, each with an event loop, may come at the same time.
        with self._taking:
            self.refuse_other_loop()
            # Connections of aiosqlite work in every event loop.
            if engine.pool in self._loops and engine.dialect.name != "sqlite":
                engine.dispose(close=False)
            self._loops[engine.pool] = self._last = ref(loop)

    def _note(self, engine: Engine) -> None:
        owner = self._owner(engine)
        if owner is None or owner.is_closed():
            self._loops[engine.pool] = ref(asyncio.get_running_loop())


_OTHER_LOOP = (
    "the broker's event loop is another one, and open: use SqlProducer here, or "
    "asyncio.run_coroutine_threadsafe(broker.publish(...), loop).result(), as its connections work "
    "in that loop only. If the other loop is not needed any more, stop the broker there and close "
    "that loop first"
)
