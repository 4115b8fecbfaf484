"""The base of all operations of `broker.admin`."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.correlation import build_message_id, parse_message_id
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHooks:
    """The parts of the broker in this process that operations use."""

    channel: str
    """PostgreSQL's NOTIFY channel that notifies other processes of a change of pauses."""
    on_paused: Callable[[frozenset[str]], None]
    """Called with the paused queues after each change."""
    on_cancel_requested: Callable[[CancelRequest], None]
    """Called with each request to cancel a message."""
    pause_semaphore: LoopSemaphore
    """Held from the write of a change until `on_paused` was called, so that of two concurrent calls
    `on_paused` gets the later state last."""
    pipelines: Iterable[Any]
    """Pipelines whose names appear in explanations."""
    on_due: Callable[[Iterable[str]], None]
    """Called with the queues that have a message which may be due now."""
    on_rescheduled: Callable[[], None]
    """Called when an operator has changed a schedule."""
    publish: PublishFunction
    """Publishes with the broker's codec, middlewares and limits."""
    get_process: Callable[[], ProcessHealth]
    """Returns the health of this process."""
    get_process_info: Callable[[], ProcessInfo]
    """Returns the wake-ups, the relays and the state of this process."""
    find_write_problem: Callable[[], Awaitable[str | None]]
    """Returns why the database takes no writes."""


class AdminOperations:
    """Holds the store, and the callbacks of this process."""

    def __init__(self, store: "Store", hooks: ProcessHooks) -> None:
        """Work on the tables of `store`, and notify this process of changes by `hooks`."""
        self._store = store
        self._hooks = hooks

    @property
    def _writable_store(self) -> "Store":
        """The store, for a change.

        Raises:
            NotSupportedError: the caller is a handler with transactional=True on SQLite.
        """
        self._check_not_in_handler()
        return self._store

    async def _find_row_id(self, message_id: int | str) -> int:
        """Return the id of a message's row.

        Raises:
            SetupError: `message_id` is not the id of a message, or its row's id was given again.
        """
        await self._check_ids([message_id])
        return parse_message_id(message_id)[0]

    async def _check_ids(self, message_ids: Iterable[int | str]) -> None:
        """Check that no row of `message_ids` belongs to another message.

        A database that loses commits, such as an asynchronous standby that takes over, gives the
        ids of lost rows again. Only the text of `message.message_id` tells the messages apart.
        """
        times: dict[int, set[datetime]] = {}
        for row_id, created_at in map(parse_message_id, message_ids):
            if created_at is not None:
                times.setdefault(row_id, set()).add(created_at)
        if not times:
            return
        for row_id, created_at in await self._store.messages.list_times(list(times)):
            for expected in times[row_id] - {created_at}:
                raise SetupError(
                    f"got message_id {build_message_id(row_id, expected)}, but message {row_id} is "
                    f"another one, published at {created_at}: the database has lost the first and "
                    f"given its id again; give {row_id} to name the other"
                )

    def _check_not_in_handler(self) -> None:
        """Refuse changes in a transactional handler on SQLite.

        Its transaction holds the only write lock, so a change in another transaction would wait
        for the handler that waits for the change.
        """
        refuse_in_handler(self._store.dialect, self._store.engine, "a change by broker.admin")
