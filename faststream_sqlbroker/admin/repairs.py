"""Changes of single messages, and the publish of one."""

from datetime import datetime
from typing import Any

from faststream_sqlbroker.admin.arguments import (
    message_number,
    moment_or_delay,
    operator_name,
    text_or_none,
)
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.checks import checked_name, checked_queue
from faststream_sqlbroker.core.jobs import RETRY
from faststream_sqlbroker.core.orders import Repair
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

HIGHEST_PRIORITY = 100
"""The CHECK of the message table allows as much below 0."""
UNCHANGED: Any = type("Unchanged", (), {"__repr__": lambda _: "UNCHANGED"})()
"""The default of an argument for which None has a meaning."""


class Repairs(Operations):
    """Changes of a single message that waits.

    None of them but `cancel` touches a message that a subscriber has leased: its handler may run.
    What they return says so. What is done is in the `audit`, with the name of who did it: `by`, or
    user and host.
    """

    async def cancel(
        self, message_id: int | str, *, reason: str | None = None, by: str | None = None
    ) -> Repair:
        """End a message as DISCARDED, with the reason `cancelled`.

        Without an archive it is deleted. A message that another one supersedes, or that holds its
        key, gives way as if it had been handled.

        If a subscriber has leased it, that is asked to cancel it, and the answer is `requested`.
        It learns of the request within a second on PostgreSQL with asyncpg, with its next sign of
        life on other databases (`presence_interval`), and cancels the handler's task. The message
        is DISCARDED under its lease; `transactional=True` rolls back, but any other effect of the
        handler stays. A handler that ends first wins: what it acks, rejects or moves stays so,
        but it is not tried again. The other messages of a batch come again at once, and no
        delivery is counted. A synchronous handler goes on; its lease is not renewed any more.
        When the lease runs out the message is discarded, also if its process has died, or if the
        application holds it (`reserve`, `get_one`). With `AckPolicy.ACK_FIRST` a message that has
        started has ended.

        Args:
            message_id: As `publish` returns it; or as text, as in a handler's `message.message_id`.
            reason: Written to `last_error` with `by`, before the last error; cut to 1 000 bytes.
            by: Who cancels, as text; default user and host.

        Raises:
            SetupError: an argument is not valid.
        """
        who = operator_name(by)
        why = text_or_none("reason", reason)
        text = f"cancelled by {who}" + (f": {why}" if why else "")
        return await self._changing.repairs.cancel(
            message_number(message_id), text, who, on_asked=self._asked
        )

    async def retry_now(self, message_id: int | str, *, by: str | None = None) -> Repair:
        """Make a message due now that waits for a later time or for the next attempt.

        Its attempts and deliveries stay counted. Policies see it as if its own time had come: with
        `Throttle` per key it needs a slot. One that stands by keeps its place, as with `postpone`.

        Raises:
            SetupError: `message_id` is not a whole number of 64 bits.
        """
        number = message_number(message_id)
        return self._told(
            await self._changing.repairs.set_due(number, 0.0, operator_name(by), RETRY)
        )

    async def postpone(
        self, message_id: int | str, until: Duration | datetime, *, by: str | None = None
    ) -> Repair:
        """Make a message due at another time.

        One that stands by under `Debounce` or `KeepLast` keeps its place: it goes when the newer
        one cannot.

        Args:
            message_id: As for `cancel`.
            until: A duration from now (seconds, a timedelta or text like "1.5h") or an aware
                datetime, by the database's clock.
            by: Who does it, as text; default user and host.

        Raises:
            SetupError: an argument is not valid.
        """
        at = moment_or_delay("until", until)
        number = message_number(message_id)
        return self._told(await self._changing.repairs.set_due(number, at, operator_name(by)))

    async def move(self, message_id: int | str, queue: str, *, by: str | None = None) -> Repair:
        """Move a message to another queue, as a handler's `Move` does, due there now.

        Its id, body, headers, key and priority stay; attempts and deliveries are counted anew, and
        its `dedup_id` is free again.

        Raises:
            SetupError: an argument is not valid.
        """
        name = checked_queue(queue)
        found = await self._changing.repairs.move(
            message_number(message_id), name, operator_name(by)
        )
        if found.done:
            self._woken([name])
        return found

    async def edit(
        self,
        message_id: int | str,
        *,
        priority: int | None = None,
        key: str | None = UNCHANGED,
        due: Duration | datetime | None = None,
        by: str | None = None,
    ) -> Repair:
        """Change how a message waits; what is not given stays.

        Args:
            message_id: As for `cancel`.
            priority: -100 to 100; higher comes first.
            key: What policies and `ordered=True` work on; None takes it away. The message takes
                part in the bursts of that key, if it was not delivered, nor let in by a Throttle
                that refuses.
            due: As `until` of `postpone`.
            by: Who does it, as text; default user and host.

        Raises:
            SetupError: an argument is not valid, or nothing is given.
        """
        fields: dict[str, Any] = {}
        if priority is not None:
            fields["priority"] = _priority(priority)
        if key is not UNCHANGED:
            fields["key"] = None if key is None else checked_name(key, "a key")
        at = None if due is None else moment_or_delay("due", due)
        if not fields and at is None:
            raise SetupError("edit needs priority, key or due")
        number = message_number(message_id)
        return self._told(await self._changing.repairs.edit(number, fields, at, operator_name(by)))

    def _told(self, found: Repair) -> Repair:
        if found.done and found.queue is not None:
            self._woken([found.queue])
        return found


def _priority(value: int) -> int:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not -HIGHEST_PRIORITY <= value <= HIGHEST_PRIORITY
    ):
        raise SetupError(f"priority must be a whole number from -100 to 100, got {short(value)}")
    return value


class Publishing(Operations):
    """`publish`."""

    async def publish(
        self,
        message: Any = None,
        queue: str = "",
        *,
        by: str | None = None,
        **options: Any,
    ) -> int | None:
        """Publish a message as `broker.publish` does; the `audit` names who did.

        The message and its entry in the audit are committed together when this returns. The entry
        has the queue and the message's id, not its body.

        Args:
            message: The body: bytes and str unchanged, anything else as JSON.
            queue: Full name of the queue.
            by: Who publishes, as text; default user and host.
            options: As of `broker.publish`, without those of a transaction.

        Returns:
            The message's id; None if the queue has a message with the same dedup_id already, or if
            a middleware drops it: nothing was written then.

        Raises:
            SetupError: `queue` is not the name of a queue, or `by` is not text.
            PublishError: a value cannot be stored, or there is no such option; nothing was written.
            QueueFullError: the queue is full, and no room came within the timeout of its
                `max_depth`, whatever that does with other publishes.
        """
        who = operator_name(by)
        self._refuse_in_handler()
        return await self._publish(message, checked_queue(queue), who, options)
