"""What is to be published: by whoever calls `publish`, and by a handler's return value."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream.response import BatchPublishCommand, PublishCommand, PublishType, Response

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

OPTIONS = ("priority", "key", "dedup_id", "delay", "next_attempt_at", "expires_in")
"""What a message has beyond FastStream's own; None is "not said"."""


class SqlBrokerPublishCommand(BatchPublishCommand):
    """One publish on its way through the middlewares; checked when it becomes rows."""

    def __init__(
        self,
        message: Any,
        /,
        *messages: Any,
        queue: str,
        _publish_type: PublishType = PublishType.PUBLISH,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        priority: int | None = None,
        key: str | None = None,
        dedup_id: str | None = None,
        delay: Duration | None = None,
        next_attempt_at: datetime | None = None,
        expires_in: Duration | None = None,
        connection: "AsyncConnection | AsyncSession | None" = None,
    ) -> None:
        """`messages` are the further bodies of a batch; the other arguments are those of `publish`."""
        super().__init__(
            message,
            *messages,
            _publish_type=_publish_type,
            destination=queue,
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        self.priority = priority
        self.key = key
        self.dedup_id = dedup_id
        self.delay = delay
        self.next_attempt_at = next_attempt_at
        self.expires_in = expires_in
        self.connection = connection

    @property
    def queue(self) -> str:
        """The queue's name; the same as `destination`."""
        return self.destination

    @queue.setter
    def queue(self, value: str) -> None:
        self.destination = value

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> "SqlBrokerPublishCommand":
        """Any command as one of ours; one of ours is returned as it is.

        Args:
            cmd: Any broker's command.
            batch: Whether a list or tuple as the body is several messages.
        """
        if isinstance(cmd, cls):
            if batch and not cmd.extra_bodies:
                cmd.body, cmd.extra_bodies = cls._parse_bodies(cmd.body, batch=True)
            return cmd
        body, extra_bodies = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body,
            *extra_bodies,
            queue=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )


class SqlBrokerResponse(Response):
    """A body with its own options: returned from a handler, or an item of `publish_batch`.

    In `publish_batch` what is given here goes before the call's arguments. Returned from a handler it goes
    to each stacked `@broker.publisher`, whose own queue goes before `queue`.
    """

    def __init__(
        self,
        body: Any,
        *,
        queue: str | None = None,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        next_attempt_at: datetime | None = None,
        delay: Duration | None = None,
        priority: int | None = None,
        key: str | None = None,
        dedup_id: str | None = None,
        expires_in: Duration | None = None,
    ) -> None:
        """The arguments are those of `broker.publish`.

        Raises:
            SetupError: `next_attempt_at` has no time zone.
        """
        if isinstance(next_attempt_at, datetime) and next_attempt_at.utcoffset() is None:
            raise SetupError(
                f"next_attempt_at must have a time zone, got {next_attempt_at!r}: "
                "use datetime.now(timezone.utc) or .replace(tzinfo=...)"
            )
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.queue = queue
        self.next_attempt_at = next_attempt_at
        self.delay = delay
        self.priority = priority
        self.key = key
        self.dedup_id = dedup_id
        self.expires_in = expires_in

    def as_publish_command(self) -> SqlBrokerPublishCommand:
        """The command that a stacked publisher completes."""
        return SqlBrokerPublishCommand(
            self.body,
            queue=self.queue or "",
            headers=dict(self.headers),
            correlation_id=self.correlation_id,
            **{name: getattr(self, name) for name in OPTIONS},
        )

    def get_publish_key(self) -> str | None:
        """The key."""
        return self.key


def one_transaction(connection: Any, session: Any) -> Any:
    """`connection` or `session`, whichever was given.

    Raises:
        PublishError: both were given.
    """
    if connection is not None and session is not None:
        raise PublishError("give either connection= or session=, not both")
    return connection if connection is not None else session
