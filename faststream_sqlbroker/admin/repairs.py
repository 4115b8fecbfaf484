"""Operations on single messages: cancel, retry, postpone, move, edit and publish."""

from datetime import datetime
from typing import Any

from faststream_sqlbroker.admin.filters import (
    clean_optional_text,
    get_operator_name,
    parse_time_or_delay,
)
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.bulk_jobs import RETRY
from faststream_sqlbroker.core.checks import is_whole_number, validate_name, validate_queue
from faststream_sqlbroker.core.orders import Repair
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

MAX_PRIORITY = 100
"""Maximum priority; its negative is the minimum, by a CHECK of the message table."""
UNCHANGED_KEY: Any = type("Unchanged", (), {"__repr__": lambda _: "UNCHANGED"})()
"""Default of an argument for which None has a meaning."""


class MessageOperations(AdminOperations):
    """Changes of a single waiting message.

    Only `cancel` changes a message that a subscriber has leased, because its handler may run; other
    operations leave it unchanged, and their result says so. The `audit` records each change with
    the name of the operator: `by`, or user and host.
    """

    async def cancel(
        self, message_id: int | str, *, reason: str | None = None, by: str | None = None
    ) -> Repair:
        """End a message as DISCARDED, with the reason `cancelled`.

        Without an archive the message is deleted. Policies treat the message as if it had been
        handled: if it holds its key, the key becomes free.

        If a subscriber has leased the message, that subscriber is requested to cancel it, and the
        result is `requested`. The subscriber learns of the request within a second on PostgreSQL
        with asyncpg, and with its next heartbeat (`presence_interval`) on other databases. It then
        cancels the handler's task and discards the message. A transaction of `transactional=True`
        is rolled back; other effects of the handler stay. If the handler ends first, its ack,
        reject or move is kept; a failed message is not retried if the subscriber knows of the
        request. The other messages of its batch are due again immediately, without a counted
        delivery. A synchronous handler continues, but its lease is no longer renewed. When the
        lease expires, the message is discarded, even if its process has died, or if the application
        holds it (`reserve`, `get_one`). With `AckPolicy.ACK_FIRST` a message has ended as soon as
        its handler starts.

        Args:
            message_id: The result of `publish`; or text, such as a handler's `message.message_id`.
            reason: Written to `last_error` with `by`, before the last error; cut to 1 000 bytes.
            by: Operator's name, as text; default user and host.

        Raises:
            SetupError: an argument is not valid.
        """
        operator = get_operator_name(by)
        cleaned_reason = clean_optional_text("reason", reason)
        message = f"cancelled by {operator}" + (f": {cleaned_reason}" if cleaned_reason else "")
        return await self._writable_store.repairs.cancel(
            await self._find_row_id(message_id),
            message,
            operator,
            on_requested=self._hooks.on_cancel_requested,
        )

    async def retry_now(self, message_id: int | str, *, by: str | None = None) -> Repair:
        """Make a message due now that waits for a later time or for the next attempt.

        Attempts and deliveries keep their counts. Policies still apply, as for any due message: for
        example, a `Throttle` per key must have a free slot. A message that stands by for a newer
        message of its key keeps its position, as with `postpone`.

        Raises:
            SetupError: `message_id` is not an id, or its row's id was given to another message.
        """
        id_ = await self._find_row_id(message_id)
        return self._notify_due(
            await self._writable_store.repairs.set_due(id_, 0.0, get_operator_name(by), RETRY)
        )

    async def postpone(
        self, message_id: int | str, until: Duration | datetime, *, by: str | None = None
    ) -> Repair:
        """Make a message due at another time.

        A message that stands by under `Debounce` or `KeepLast` keeps its position: it is delivered
        if the newer message cannot be.

        Args:
            message_id: As for `cancel`.
            until: A duration from now (seconds, a timedelta or text like "1.5h") or an aware
                datetime, by the database's clock.
            by: Operator's name, as text; default user and host.

        Raises:
            SetupError: an argument is not valid.
        """
        due = parse_time_or_delay("until", until)
        id_ = await self._find_row_id(message_id)
        return self._notify_due(
            await self._writable_store.repairs.set_due(id_, due, get_operator_name(by))
        )

    async def move(self, message_id: int | str, queue: str, *, by: str | None = None) -> Repair:
        """Move a message to another queue, as a handler's `Move` does, due there now.

        Id, body, headers, key and priority stay; attempts and deliveries restart at 0, and the
        `dedup_id` is free again.

        Raises:
            SetupError: an argument is not valid.
        """
        name = validate_queue(queue)
        repair = await self._writable_store.repairs.move(
            await self._find_row_id(message_id), name, get_operator_name(by)
        )
        if repair.done:
            self._hooks.on_due([name])
        return repair

    async def edit(
        self,
        message_id: int | str,
        *,
        priority: int | None = None,
        key: str | None = UNCHANGED_KEY,
        due: Duration | datetime | None = None,
        by: str | None = None,
    ) -> Repair:
        """Change priority, key or due time of a waiting message; omitted values stay.

        Args:
            message_id: As for `cancel`.
            priority: -100 to 100; higher comes first.
            key: The key for policies and `ordered=True`; None removes it. The message takes
                part in the bursts of that key, if it was not delivered, nor admitted by a Throttle
                that refuses.
            due: As `until` of `postpone`.
            by: Operator's name, as text; default user and host.

        Raises:
            SetupError: an argument is not valid, or no change is given.
        """
        fields: dict[str, Any] = {}
        if priority is not None:
            fields["priority"] = _validate_priority(priority)
        if key is not UNCHANGED_KEY:
            fields["key"] = None if key is None else validate_name(key, "a key")
        due_at = None if due is None else parse_time_or_delay("due", due)
        if not fields and due_at is None:
            raise SetupError("edit needs priority, key or due")
        id_ = await self._find_row_id(message_id)
        return self._notify_due(
            await self._writable_store.repairs.edit(id_, fields, due_at, get_operator_name(by))
        )

    def _notify_due(self, repair: Repair) -> Repair:
        """Wake this process's fetch loops, because the message may be due now; return `repair`."""
        if repair.done and repair.queue is not None:
            self._hooks.on_due([repair.queue])
        return repair


def _validate_priority(value: int) -> int:
    """Return a priority that the message table accepts."""
    if not is_whole_number(value) or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise SetupError(
            f"priority must be a whole number from -100 to 100, got {format_value(value)}"
        )
    return value


class PublishOperations(AdminOperations):
    """Publishes messages, with an entry in the audit."""

    async def publish(
        self, message: Any = None, queue: str = "", *, by: str | None = None, **options: Any
    ) -> int | None:
        """Publish a message as `broker.publish` does; the `audit` names the operator.

        The message and its entry in the audit are committed together when this returns. The entry
        has the queue and the message's id, not its body.

        Args:
            message: The body: bytes and str unchanged, anything else as JSON.
            queue: Full name of the queue.
            by: Operator's name, as text; default user and host.
            options: Options of `broker.publish`, except those of a transaction.

        Returns:
            The message's id; None if the queue has a message with the same dedup_id already, or if
            a middleware drops the message: nothing was written then.

        Raises:
            SetupError: `queue` is not the name of a queue, or `by` is not text.
            PublishError: a value cannot be stored, or there is no such option; nothing was written.
            QueueFullError: the queue is full, and stayed so for the timeout of its `max_depth`,
                whatever `max_depth` does with other publishes.
        """
        operator = get_operator_name(by)
        self._check_not_in_handler()
        return await self._hooks.publish(message, validate_queue(queue), operator, options)
