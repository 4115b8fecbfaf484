"""Options and commands of a publish, and the response that a handler may return."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from faststream.message import gen_cor_id
from faststream.response import BatchPublishCommand, PublishCommand, PublishType, Response
from typing_extensions import Unpack

from faststream_sqlbroker.core.checks import build_hints, reject_unknown_options
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from faststream_sqlbroker.adapter.messages import CodecProto


class RowOptions(TypedDict, total=False):
    """Values that a publish stores besides body and headers; None means omitted."""

    priority: int | None
    """The priority, -100 to 100; higher priorities are claimed first. Default 0."""
    key: str | None
    """The subject of the message, such as a customer id: 1 to 255 characters."""
    delay: Duration | None
    """Time until the message is due: seconds, a timedelta or text like "1.5h"; a negative value
    means now. Cannot be combined with next_attempt_at.
    """
    next_attempt_at: datetime | float | timedelta | str | None
    """Time at which the message is due: a datetime with a time zone, or Unix seconds. A timedelta
    or text like "2h45m" counts from now by the database's clock. Cannot be combined with delay.
    """
    expires_in: Duration | None
    """Time after which no handler starts for the message; greater than 0."""
    destination: str | None
    """Final queue of the message, stored as a header: a subscriber of `queue` with
    forward_to=DESTINATION moves the message there.
    """
    dedup_id: str | None
    """Deduplication id, 1 to 255 characters. While the queue has a message with this id, a second
    one is not stored.
    """
    lookup: str | None
    """A value of 1 to 255 characters by which `broker.admin.mirrored` finds the message until it
    leaves.
    """
    info: str | None
    """Text of at most 1,000 characters about a message with a lookup value; `broker.admin.set_info`
    changes it.
    """


class MessageOptions(RowOptions, total=False):
    """Keyword arguments of every publish. None is the same as omitting an argument."""

    headers: dict[str, Any] | None
    """JSON values by name."""
    correlation_id: str | None
    """The correlation id, by default created by `id_generator`. Without a generator, it is derived
    from the ids of the message and of the database.
    """
    reply_to: str
    """The queue for the handler's answer."""


class TransactionOptions(TypedDict, total=False):
    """The caller's transaction: at most one of these arguments."""

    connection: "AsyncConnection | None"
    """Publish in the transaction of this connection."""
    session: "AsyncSession | None"
    """Publish in the transaction of this session."""


class PublishOptions(MessageOptions, TransactionOptions, total=False):
    """Keyword arguments of `publish` and `publish_batch`."""

    with_ack: bool | None
    """True, only in a handler: publish in the transaction that acks the handler's message, and only
    if it is acked. `publish` then returns None instead of an id. False: commit immediately, even
    in a handler with transactional=True, whose transaction a publish joins by default; not
    possible there on SQLite.
    """


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `request`. None is the same as omitting an argument."""

    headers: dict[str, Any] | None
    """JSON values by name."""
    correlation_id: str | None
    """The correlation id, by default created by `id_generator`. The reply has the same id, unless
    its handler sets another.
    """
    priority: int | None
    """The priority, -100 to 100; higher priorities are claimed first. Default 0."""
    key: str | None
    """The subject of the message, such as a customer id: 1 to 255 characters."""
    expires_in: Duration | None
    """Time after which no handler starts for the request; greater than 0. Default: the timeout of
    the request.
    """
    destination: str | None
    """As for `publish`."""


class SqlBrokerPublishCommand(BatchPublishCommand):
    """A publish on the way through the middlewares; `make_row` validates the values afterwards.

    `options` holds the passed values of priority, key, dedup_id, delay, next_attempt_at,
    expires_in, destination, lookup and info. `connection` is the caller's AsyncConnection or
    AsyncSession, or None.
    """

    timeout: float | None = None
    """Seconds that a request waits for its reply; None if this is not a request."""
    id_generator: "Callable[[], str]" = staticmethod(gen_cor_id)
    """Creates the correlation id on the first read, if none was passed."""
    responses: "list[SqlBrokerResponse | None]"
    """The response of each body; None for a body that was passed without options."""
    _correlation_id: str | None

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
        connection: "AsyncConnection | AsyncSession | None" = None,
        session: "AsyncSession | None" = None,
        with_ack: bool | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        """Create a command from the arguments of `publish`.

        `messages` are the further bodies of a batch.

        Raises:
            PublishError: more than one of connection, session and with_ack was passed, or a
                connection or session is not asynchronous.
        """
        super().__init__(
            None,
            _publish_type=_publish_type,
            destination=queue,
            # Publishers and middlewares add headers, which must not change the caller's dict.
            headers=dict(headers)
            if headers is not None and isinstance(headers, Mapping)
            else headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        self._set_messages((message, *messages))
        self.options = _filter_options(options)
        self.connection = _get_transaction(connection, session, with_ack=with_ack)
        self.with_ack = with_ack
        self.stacked = False
        """True for a handler's answer, which joins the handler's ack if possible."""
        self.codec: CodecProto | None = None
        """The codec of the publisher's router; None selects the broker's codec."""
        self.publisher: Any = None
        """The called or stacked publisher; a test records its messages."""

    @property
    def queue(self) -> str:
        """The name of the queue; an alias of `destination`."""
        return self.destination

    @queue.setter
    def queue(self, value: str) -> None:
        self.destination = value

    @property
    def correlation_id(self) -> str:
        """The correlation id; created by `id_generator` and stored on the first read if missing."""
        if not self._correlation_id:
            self._correlation_id = self.id_generator()
        return self._correlation_id

    @correlation_id.setter
    def correlation_id(self, value: str | None) -> None:
        self._correlation_id = value

    @property
    def stored_correlation_id(self) -> str | None:
        """The correlation id to store, or None to store none.

        None if the broker has no custom generator and no middleware has read the id. Handlers of
        such a message see an id derived from the message's id.
        """
        has_generator = self.id_generator is not gen_cor_id
        return self.correlation_id if has_generator else self._correlation_id

    @property
    def batch_bodies(self) -> tuple[Any, ...]:
        """The bodies of all messages; a `SqlBrokerResponse` is represented by its body.

        A middleware may replace the bodies. The options of a message stay with its body, or else
        with its position; ambiguous replacements are refused.
        """
        return () if self._is_empty and self.body is None else (self.body, *self.extra_bodies)

    @batch_bodies.setter
    def batch_bodies(self, bodies: "Sequence[Any]") -> None:
        self.responses = (
            self._align_responses(bodies) if any(self.responses) else [None] * len(bodies)
        )
        self._set_bodies(bodies)

    def _align_responses(self, bodies: "Sequence[Any]") -> list[Any]:
        """Return for each of the new `bodies` the response whose options apply, or None.

        A middleware has replaced the bodies of a batch, and each message has options of its own. A
        body that is the same object as before keeps its options, wherever it is now; another body
        takes those of its position.

        Raises:
            PublishError: the assignment is ambiguous.
        """
        responses = self.responses
        aligned = _match_responses(self.batch_bodies, responses, bodies)
        if _is_in_place(aligned, responses):
            return responses
        if not _is_unambiguous(aligned, responses, bodies):
            raise PublishError(
                f"a middleware returned {len(bodies)} other bodies for {len(responses)} messages "
                "with options: replace bodies, or change their number or order, but not both"
            )
        return [None if response is _UNMATCHED else response for response in aligned]

    def _set_messages(self, messages: "Sequence[Any]") -> None:
        """Split `messages` into bodies and responses with options.

        A response is a body with options of its own. FastStream's commands know only bodies, so the
        responses are kept separately, by position.
        """
        self.responses = [m if isinstance(m, SqlBrokerResponse) else None for m in messages]
        self._set_bodies([m.body if isinstance(m, SqlBrokerResponse) else m for m in messages])

    def _set_bodies(self, bodies: "Sequence[Any]") -> None:
        """Store the first body and the extra bodies as FastStream's batch command does.

        FastStream cannot tell an empty batch from a batch with the body None, so this is noted.
        """
        self._is_empty = not bodies
        self.body, *extra_bodies = bodies or (None,)
        self.extra_bodies = tuple(extra_bodies)

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> "SqlBrokerPublishCommand":
        """Convert a command of any broker; return a SqlBrokerPublishCommand unchanged.

        A handler's answer may come as FastStream's own command.

        Args:
            cmd: A command of any broker.
            batch: True if a body that is a list or tuple holds several messages.
        """
        command = cmd
        if not isinstance(command, cls):
            command = cls(
                cmd.body,
                queue=cmd.destination,
                headers=cmd.headers,
                correlation_id=cmd.correlation_id,
                reply_to=cmd.reply_to,
                _publish_type=cmd.publish_type,
            )
        if batch and not command.extra_bodies:
            body = command.body
            is_batch = isinstance(body, list | tuple)
            command._set_messages(body if is_batch else () if body is None else (body,))
        return command


def _match_responses(
    old_bodies: "Sequence[Any]", responses: "list[Any]", new_bodies: "Sequence[Any]"
) -> "list[Any]":
    """Return for each new body the response of the identical old body, or `_UNMATCHED`.

    Bodies are compared by identity: equal bodies may have different options, and some bodies cannot
    be compared.
    """
    unused: dict[int, list[Any]] = {}
    # An object that occurs several times has a response for each of its positions.
    for body, response in zip(old_bodies, responses, strict=False):
        unused.setdefault(id(body), []).append(response)
    return [(unused.get(id(body)) or [_UNMATCHED]).pop(0) for body in new_bodies]


def _is_unambiguous(aligned: "list[Any]", responses: "list[Any]", bodies: "Sequence[Any]") -> bool:
    """Return True if bodies only moved, were added or removed, and no options are lost.

    `aligned` has for each new body the response of the identical old body, or `_UNMATCHED`. Equal
    numbers and texts may be the same object, so a new body may look like another body that has
    moved. All bodies may swap between False and True, as `not` produces them.
    """
    is_replaced = _UNMATCHED in aligned
    if len(aligned) == len(responses):
        return not is_replaced and {*map(type, bodies)} != {bool}
    return not is_replaced or all(response is None or response in aligned for response in responses)


def _is_in_place(aligned: "list[Any]", responses: "list[Any]") -> bool:
    """Return True if no body has moved: each is replaced or still at the same position.

    `aligned` has for each new body the response of the identical old body, or `_UNMATCHED`. The
    options of a replaced body stay at its position.
    """
    pairs = zip(aligned, responses, strict=False)
    return len(aligned) == len(responses) and all(
        aligned_response in {_UNMATCHED, response} for aligned_response, response in pairs
    )


class SqlBrokerResponse(Response):
    """A body with options, to return from a handler or to pass to `publish_batch`.

    In `publish_batch` its options override the arguments of the call. When returned from a handler,
    it goes to each stacked `@broker.publisher`; the queue of a publisher overrides `queue`.
    """

    def __init__(
        self,
        body: Any = None,
        *,
        queue: str | None = None,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        """Create a response from the arguments of `broker.publish`.

        Raises:
            SetupError: `next_attempt_at` has no time zone.
        """
        next_attempt_at = options.get("next_attempt_at")
        if isinstance(next_attempt_at, datetime) and next_attempt_at.utcoffset() is None:
            raise SetupError(
                f"next_attempt_at must have a time zone, got {next_attempt_at!r}: use "
                "datetime.now(timezone.utc), or delay"
            )
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.queue = queue
        self.options = _filter_options(options)

    def as_publish_command(self) -> SqlBrokerPublishCommand:
        """Create a new command, separately for each publisher, which adds its own options."""
        return SqlBrokerPublishCommand(
            self.body,
            queue=self.queue or "",
            headers=self.headers,
            correlation_id=self.correlation_id,
            **self.options,
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        """Return an empty schema, which allows any body in AsyncAPI documents."""
        return {}

    def get_publish_key(self) -> str | None:
        """Return the message's key, for FastStream."""
        key: str | None = self.options.get("key")
        return key


SqlBrokerPublishMessage = SqlBrokerResponse


def make_request(
    message: Any, queue: str, timeout: float, options: RequestOptions
) -> SqlBrokerPublishCommand:
    """Create the command of a request that waits `timeout` seconds for the reply.

    Raises:
        PublishError: `options` has an option that only `publish` takes; the text gives the reason.
    """
    arguments = {name: value for name, value in options.items() if value is not None}
    for name, reason in _PUBLISH_ONLY_OPTIONS.items():
        if arguments.get(name, False) is not False:
            raise PublishError(f"request does not take {name}=: {reason}")
        arguments.pop(name, None)
    cmd = SqlBrokerPublishCommand(
        message,
        queue=queue,
        _publish_type=PublishType.REQUEST,
        **arguments,  # type: ignore[arg-type] # the names are checked by the call
    )
    cmd.timeout = timeout
    return cmd


_NEVER_COMMITTED = (
    "a handler sees the request only after the transaction is committed, so its reply would never "
    "arrive: omit it to commit the request immediately, or publish with reply_to="
)
_DUE_IMMEDIATELY = "its caller waits, so it is due immediately: omit it, or publish with reply_to="
_PUBLISH_ONLY_OPTIONS = {
    "connection": _NEVER_COMMITTED,
    "session": _NEVER_COMMITTED,
    "with_ack": _NEVER_COMMITTED,
    "delay": _DUE_IMMEDIATELY,
    "next_attempt_at": _DUE_IMMEDIATELY,
    "dedup_id": "a duplicate is not stored and gets no reply: omit it",
    "lookup": "its caller waits for the reply: omit it, or publish with reply_to=",
    "info": "it belongs to a lookup value, which a request does not have: omit it",
    "reply_to": "the caller gets the reply: to send it to a queue, publish with reply_to=",
}
"""Options of `publish` that `request` does not take, with the reason."""


_OPTIONS = frozenset(RowOptions.__annotations__)
FOREIGN_OPTIONS = build_hints(
    ("routing_key topic subject channel stream list", "use queue"),
    ("exchange", "omit it, and publish to each queue by name"),
    ("expiration ttl expires", "use expires_in"),
    ("countdown", "use delay"),
    ("eta", "use next_attempt_at"),
    ("partition partition_key", "use key"),
    ("persist mandatory no_confirm", "omit it, every publish is stored"),
)
"""Options of other brokers, with the replacement."""


def _filter_options(options: RowOptions) -> dict[str, Any]:
    """Return the options that are not None; most messages have none.

    Raises:
        UnknownOptionError: an unknown option; also a TypeError.
    """
    if options and not options.keys() <= _OPTIONS:
        reject_unknown_options(
            "a publish", options, PublishOptions.__annotations__, FOREIGN_OPTIONS
        )
    return {name: value for name, value in options.items() if value is not None}


_UNMATCHED: Any = object()
"""Marks a new body without a matching response."""
OTHER_OPTIONS: Any = object()
"""Returned by `get_only_transaction` if there are further options."""


def get_only_transaction(options: PublishOptions) -> Any:
    """Return the connection or session to publish with, if `options` contain nothing else.

    Without other options a publish may bypass FastStream, which is faster. Return None for no
    transaction, and `OTHER_OPTIONS` if there are other options.

    Raises:
        PublishError: both were passed, or a connection or session is not asynchronous.
    """
    if not options:
        return None
    if not options.keys() <= _TRANSACTION_OPTIONS:
        return OTHER_OPTIONS
    return _get_transaction(options.get("connection"), options.get("session"), with_ack=None)


_TRANSACTION_OPTIONS = frozenset(("connection", "session"))


def _get_transaction(connection: Any, session: Any, *, with_ack: bool | None) -> Any:
    """Return the passed connection or session; refuse more than one transaction.

    Return None without such an argument: the publish then uses a transaction of its own, or the
    handler's.
    """
    if connection is None and session is None and with_ack is None:
        return None
    if not isinstance(with_ack, bool | None):
        raise PublishError(f"with_ack must be True or False, got {with_ack!r}")
    if (connection is not None) + (session is not None) + bool(with_ack) > 1:
        raise PublishError(
            "give only one of connection=, session= and with_ack=True: each names a transaction"
        )
    transaction = connection if connection is not None else session
    if transaction is not None and not (
        hasattr(transaction, "sync_connection") or hasattr(transaction, "sync_session")
    ):
        raise PublishError(
            f"connection and session take an AsyncConnection or AsyncSession, got {transaction!r}: "
            "use publish_sync for a synchronous one"
        )
    return transaction
