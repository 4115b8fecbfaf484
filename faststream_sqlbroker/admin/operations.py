"""What every operation of `broker.admin` works with."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.health import ProcessHealth, Surroundings
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


Publish = Callable[[Any, str, str, dict[str, Any]], Awaitable[int | None]]
"""Writes a message to a queue and who did it to the audit, in one transaction; the message's id."""


async def _no_publish(_message: Any, _queue: str, _by: str, _options: Any) -> int | None:
    """Refuse: publishing needs the broker's codec and middlewares."""
    raise SetupError("publish needs broker.admin: this object was made without a broker")


async def _no_problem() -> None:
    """Know of none: nothing probes."""


class Operations:
    """The store, and what this process must learn of a change."""

    def __init__(
        self,
        store: "Store",
        *,
        channel: str = "",
        heard: Callable[[frozenset[str]], None] = lambda _paused: None,
        asked: Callable[[CancelRequest], None] = lambda _request: None,
        turn: LoopSemaphore | None = None,
        pipelines: Iterable[Any] = (),
        woken: Callable[[Iterable[str]], None] = lambda _queues: None,
        rescheduled: Callable[[], None] = lambda: None,
        publish: Publish = _no_publish,
        process: Callable[[], ProcessHealth] = ProcessHealth,
        surroundings: Callable[[], Surroundings] = Surroundings,
        write_problem: Callable[[], Awaitable[str | None]] = _no_problem,
    ) -> None:
        """Work on the tables of `store`.

        Args:
            store: The store.
            channel: PostgreSQL's NOTIFY channel that tells other processes of a change of pauses.
            heard: Called with the paused queues after each change, for this process.
            asked: Called with each request to cancel a message, for this process.
            turn: Held from the write of a change until `heard` was called, so that of two calls at
                the same time `heard` gets the later state last.
            pipelines: Their names are shown in explanations.
            woken: Called with the queues that have a message which may be due now.
            rescheduled: Called when an operator has changed a schedule, for this process.
            publish: Publishes with the broker's codec, middlewares and limits.
            process: Tells of this process.
            surroundings: Tells of what is around it.
            write_problem: Tells why the database takes no writes.
        """
        self._store = store
        self._channel = channel
        self._heard = heard
        self._asked = asked
        self._turn = LoopSemaphore() if turn is None else turn
        self._pipelines = pipelines
        self._woken = woken
        self._rescheduled = rescheduled
        self._publish = publish
        self._process = process
        self._surroundings = surroundings
        self._write_problem = write_problem

    @property
    def _changing(self) -> "Store":
        """The store, for a change.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
        """
        self._refuse_in_handler()
        return self._store

    def _refuse_in_handler(self) -> None:
        refuse_in_handler(self._store.dialect, self._store.engine, "a change by broker.admin")
