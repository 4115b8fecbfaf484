"""The base of all operations of `broker.admin`."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.health import ProcessHealth, ProcessInfo
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


PublishFunction = Callable[[Any, str, str, dict[str, Any]], Awaitable[int | None]]
"""Writes a message to a queue and the operator's name to the audit, in one transaction; returns the
message's id.
"""


async def _reject_publish(_message: Any, _queue: str, _by: str, _options: Any) -> int | None:
    """Refuse to publish, which needs the broker's codec and middlewares."""
    raise SetupError("this object was created without a broker: publish with broker.admin")


async def _skip_write_check() -> None:
    """Report that writes work: the default without a broker, which has the real check."""


class AdminOperations:
    """Holds the store, and callbacks that notify this process of a change."""

    def __init__(
        self,
        store: "Store",
        *,
        channel: str = "",
        on_paused: Callable[[frozenset[str]], None] = lambda _paused: None,
        on_cancel_requested: Callable[[CancelRequest], None] = lambda _request: None,
        pause_semaphore: LoopSemaphore | None = None,
        pipelines: Iterable[Any] = (),
        on_due: Callable[[Iterable[str]], None] = lambda _queues: None,
        on_rescheduled: Callable[[], None] = lambda: None,
        publish: PublishFunction = _reject_publish,
        get_process: Callable[[], ProcessHealth] = ProcessHealth,
        get_process_info: Callable[[], ProcessInfo] = ProcessInfo,
        find_write_problem: Callable[[], Awaitable[str | None]] = _skip_write_check,
    ) -> None:
        """Work on the tables of `store`.

        Args:
            store: The store.
            channel: PostgreSQL's NOTIFY channel that notifies other processes of a change of
                pauses.
            on_paused: Called with the paused queues after each change, for this process.
            on_cancel_requested: Called with each request to cancel a message, for this process.
            pause_semaphore: Held from the write of a change until `on_paused` was called, so that
                of two concurrent calls `on_paused` gets the later state last.
            pipelines: Pipelines whose names appear in explanations.
            on_due: Called with the queues that have a message which may be due now.
            on_rescheduled: Called when an operator has changed a schedule, for this process.
            publish: Publishes with the broker's codec, middlewares and limits.
            get_process: Returns the health of this process.
            get_process_info: Returns the wake-ups, the relays and the state of this process.
            find_write_problem: Returns why the database takes no writes.
        """
        self._store = store
        self._channel = channel
        self._on_paused = on_paused
        self._on_cancel_requested = on_cancel_requested
        self._pause_semaphore = LoopSemaphore() if pause_semaphore is None else pause_semaphore
        self._pipelines = pipelines
        self._on_due = on_due
        self._on_rescheduled = on_rescheduled
        self._publish = publish
        self._get_process = get_process
        self._get_process_info = get_process_info
        self._find_write_problem = find_write_problem

    @property
    def _writable_store(self) -> "Store":
        """The store, for a change.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
        """
        self._check_not_in_handler()
        return self._store

    def _check_not_in_handler(self) -> None:
        """Refuse changes in a transactional handler on SQLite.

        Its transaction holds the only write lock, so a change in another transaction would wait
        for the handler that waits for the change.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "a change by broker.admin")
