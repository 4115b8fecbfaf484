"""The options of a publish, its command, and the response that a handler may return."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from faststream.message import gen_cor_id
from faststream.response import BatchPublishCommand, PublishCommand, PublishType, Response
from typing_extensions import Unpack

from faststream_sqlbroker.core.checks import advice, refuse_unknown
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from faststream_sqlbroker.adapter.messages import CodecProto


class RowOptions(TypedDict, total=False):
    """What a publish stores besides body and headers; None is the same as leaving one out."""

    priority: int | None
    """-100 to 100; higher ones are claimed first. Default 0."""
    key: str | None
    """1 to 255 characters; names what the message is about."""
    delay: Duration | None
    """Time until it is due: seconds, a timedelta or text like "1.5h"; a negative value means now.
    Not together with next_attempt_at."""
    next_attempt_at: datetime | float | timedelta | str | None
    """When it is due: a datetime with a time zone, or Unix seconds. A timedelta or text like
    "2h45m" counts from now by the database's clock. Not together with delay."""
    expires_in: Duration | None
    """Time after which no handler starts for it any more; longer than 0."""
    destination: str | None
    """Queue that the message is meant for, stored as a header: a subscriber of `queue` with
    forward_to=DESTINATION moves the message there."""
    dedup_id: str | None
    """1 to 255 characters. While the queue has a message with it, a second one is not stored."""
    lookup: str | None
    """1 to 255 characters by which `broker.admin.mirrored` finds the message until it leaves."""
    info: str | None
    """Text of at most 1,000 characters about a message with a lookup value; `broker.admin.set_info`
    changes it."""


class MessageOptions(RowOptions, total=False):
    """Keyword arguments of every publish. None is the same as leaving an argument out."""

    headers: dict[str, Any] | None
    """JSON values by name."""
    correlation_id: str | None
    """Default: what `id_generator` makes. Without one, it is made of the message's
    id and the database's."""
    reply_to: str
    """Queue for the handler's answer."""


class TransactionOptions(TypedDict, total=False):
    """The caller's transaction: at most one of them."""

    connection: "AsyncConnection | None"
    """Publish in the transaction of this connection."""
    session: "AsyncSession | None"
    """Publish in the transaction of this session."""


class PublishOptions(MessageOptions, TransactionOptions, total=False):
    """Keyword arguments of `publish` and `publish_batch`."""

    with_ack: bool | None
    """True, only in a handler: publish in the transaction that acks its message, and only if it is
    acked. `publish` then returns None instead of an id. False: commit at once, also in a handler
    with transactional=True, whose transaction a publish joins otherwise; not there on SQLite."""


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `request`. None is the same as leaving an argument out."""

    headers: dict[str, Any] | None
    """JSON values by name."""
    correlation_id: str | None
    """Default: what `id_generator` makes. The reply has the same, unless its handler gives it
    another."""
    priority: int | None
    """-100 to 100; higher ones are claimed first. Default 0."""
    key: str | None
    """1 to 255 characters; names what the message is about."""
    expires_in: Duration | None
    """Time after which no handler starts for it any more; longer than 0. Default: the request's
    timeout."""
    destination: str | None
    """As of `publish`."""


class SqlBrokerPublishCommand(BatchPublishCommand):
    """One publish on its way through the middlewares; `make_row` checks its values afterwards.

    `options` holds those of priority, key, dedup_id, delay, next_attempt_at, expires_in,
    destination, lookup and info that were given. `connection` is the caller's AsyncConnection or
    AsyncSession, or None.
    """

    timeout: float | None = None
    """Seconds that a request waits for its reply; None: it is no request."""
    id_generator: "Callable[[], str]" = staticmethod(gen_cor_id)
    """Makes the correlation id when it is first read, if none was given."""
    responses: "list[SqlBrokerResponse | None]"
    """Of each body its response; None if the body was given as it is."""
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
        """The arguments are those of `publish`; `messages` are the further bodies of a batch.

        Raises:
            PublishError: more than one of connection, session and with_ack was given, or a
                connection or session is not asynchronous.
        """
        super().__init__(
            None,
            _publish_type=_publish_type,
            destination=queue,
            # Publishers and middlewares add to the headers; the caller's dict must stay as it is.
            headers=dict(headers)
            if headers is not None and isinstance(headers, Mapping)
            else headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        self._hold((message, *messages))
        self.options = _given(options)
        self.connection = _one_transaction(connection, session, with_ack=with_ack)
        self.with_ack = with_ack
        self.stacked = False
        """Whether this is a handler's answer; it joins the handler's ack if that is possible."""
        self.codec: CodecProto | None = None
        """The codec of the publisher's router; None: the broker's codec encodes the bodies."""
        self.publisher: Any = None
        """The publisher that was called or is stacked; a test records what it publishes."""

    @property
    def queue(self) -> str:
        """The queue's name; the same as `destination`."""
        return self.destination

    @queue.setter
    def queue(self, value: str) -> None:
        self.destination = value

    @property
    def correlation_id(self) -> str:
        """The id that was given, else one of `id_generator`, which is then stored."""
        if not self._correlation_id:
            self._correlation_id = self.id_generator()
        return self._correlation_id

    @correlation_id.setter
    def correlation_id(self, value: str | None) -> None:
        self._correlation_id = value

    @property
    def stored_correlation_id(self) -> str | None:
        """The id to store: None if the broker has no generator of its own, and no middleware has
        read the id; messages without one have an id that is made of theirs.
        """
        own = self.id_generator is not gen_cor_id
        return self.correlation_id if own else self._correlation_id

    @property
    def batch_bodies(self) -> tuple[Any, ...]:
        """The bodies of all messages; a `SqlBrokerResponse` is represented by its body.

        A middleware may replace them. The options of a message stay with its body, or else with its
        place; what may be meant either way is refused.
        """
        return () if self._is_empty and self.body is None else (self.body, *self.extra_bodies)

    @batch_bodies.setter
    def batch_bodies(self, bodies: "Sequence[Any]") -> None:
        self.responses = self._aligned(bodies) if any(self.responses) else [None] * len(bodies)
        self._keep(bodies)

    def _aligned(self, bodies: "Sequence[Any]") -> list[Any]:
        """Return the response whose options each of the new `bodies` has, or None.

        Raises:
            PublishError: that is not clear.
        """
        own = self.responses
        aligned = _matched(self.batch_bodies, own, bodies)
        if _in_place(aligned, own):
            return own
        if not _is_clear(aligned, own, bodies):
            raise PublishError(
                f"a middleware gave {len(bodies)} other bodies for {len(own)} with options of "
                "their own: replace bodies, or change their number or order"
            )
        return [None if response is OTHERS else response for response in aligned]

    def _hold(self, messages: "Sequence[Any]") -> None:
        """Take `messages` apart into bodies and the responses that have options of their own."""
        self.responses = [m if isinstance(m, SqlBrokerResponse) else None for m in messages]
        self._keep([m.body if isinstance(m, SqlBrokerResponse) else m for m in messages])

    def _keep(self, bodies: "Sequence[Any]") -> None:
        self._is_empty = not bodies
        self.body, *rest = bodies or (None,)
        self.extra_bodies = tuple(rest)

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> "SqlBrokerPublishCommand":
        """Convert any broker's command; a SqlBrokerPublishCommand is returned itself.

        Args:
            cmd: Any broker's command.
            batch: Whether a body that is a list or tuple holds several messages.
        """
        own = cmd
        if not isinstance(own, cls):
            own = cls(
                cmd.body,
                queue=cmd.destination,
                headers=cmd.headers,
                correlation_id=cmd.correlation_id,
                reply_to=cmd.reply_to,
                _publish_type=cmd.publish_type,
            )
        if batch and not own.extra_bodies:
            body = own.body
            several = isinstance(body, list | tuple)
            own._hold(body if several else () if body is None else (body,))
        return own


def _matched(old: "Sequence[Any]", own: "list[Any]", new: "Sequence[Any]") -> "list[Any]":
    """Return that of `own` which belongs to each of the `new` bodies, or `OTHERS`."""
    waiting: dict[int, list[Any]] = {}
    for body, response in zip(old, own, strict=False):
        waiting.setdefault(id(body), []).append(response)
    return [(waiting.get(id(body)) or [OTHERS]).pop(0) for body in new]


def _is_clear(aligned: "list[Any]", own: "list[Any]", bodies: "Sequence[Any]") -> bool:
    """Whether the bodies have moved, or are fewer or more, and no options are lost.

    Equal numbers and texts may be one object, so that a new body may look like another one that
    has moved. All may be False and True in turn, as `not` makes them.
    """
    replaced = OTHERS in aligned
    if len(aligned) == len(own):
        return not replaced and {*map(type, bodies)} != {bool}
    return not replaced or all(each is None or each in aligned for each in own)


def _in_place(aligned: "list[Any]", own: "list[Any]") -> bool:
    """Whether each of `aligned` is `OTHERS`, or that of `own` at its place.

    The options of a body that is replaced stay at its place.
    """
    pairs = zip(aligned, own, strict=False)
    return len(aligned) == len(own) and all(each in {OTHERS, one} for each, one in pairs)


class SqlBrokerResponse(Response):
    """A body with its own options, to return from a handler or to pass to `publish_batch`.

    In `publish_batch` its options override the call's arguments. Returned from a handler, it goes
    to each stacked `@broker.publisher`; a publisher's own queue overrides `queue`.
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
        """The arguments are those of `broker.publish`.

        Raises:
            SetupError: `next_attempt_at` has no time zone.
        """
        at = options.get("next_attempt_at")
        if isinstance(at, datetime) and at.utcoffset() is None:
            raise SetupError(
                f"next_attempt_at must have a time zone, got {at!r}: "
                "use datetime.now(timezone.utc), or delay"
            )
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.queue = queue
        self.options = _given(options)

    def as_publish_command(self) -> SqlBrokerPublishCommand:
        """A new command; each publisher gets one of its own."""
        return SqlBrokerPublishCommand(
            self.body,
            queue=self.queue or "",
            headers=self.headers,
            correlation_id=self.correlation_id,
            **self.options,
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        """Any body: AsyncAPI documents describe a handler that returns a response."""
        return {}

    def get_publish_key(self) -> str | None:
        """The message's key; FastStream asks for it."""
        key: str | None = self.options.get("key")
        return key


SqlBrokerPublishMessage = SqlBrokerResponse


def make_request(
    message: Any, queue: str, timeout: float, options: RequestOptions
) -> SqlBrokerPublishCommand:
    """The command of a request that waits `timeout` seconds.

    Raises:
        PublishError: `options` has one that only `publish` takes; the text says why.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, why in _NOT_OF_REQUESTS.items():
        if given.get(name, False) is not False:
            raise PublishError(f"request does not take {name}=: {why}")
        given.pop(name, None)
    cmd = SqlBrokerPublishCommand(
        message,
        queue=queue,
        _publish_type=PublishType.REQUEST,
        **given,  # type: ignore[arg-type] # the names are checked by the call
    )
    cmd.timeout = timeout
    return cmd


_WAITS_FOR_EVER = (
    "it waits for a reply, and no handler sees a message before the transaction is committed; "
    "leave it out, the request is then committed at once, or publish with reply_to="
)
_AT_ONCE = "its caller waits, so it is due at once: leave it out, or publish with reply_to="
_NOT_OF_REQUESTS = {
    "connection": _WAITS_FOR_EVER,
    "session": _WAITS_FOR_EVER,
    "with_ack": _WAITS_FOR_EVER,
    "delay": _AT_ONCE,
    "next_attempt_at": _AT_ONCE,
    "dedup_id": "a message that is not stored gets no reply; leave it out",
    "lookup": "its caller waits for it: leave it out, or publish with reply_to=",
    "info": "it belongs to a lookup value, which a request has not: leave it out",
    "reply_to": "the reply goes to its caller; to send it to a queue, publish with reply_to=",
}
"""Options of `publish` only, and why."""


_OPTIONS = frozenset(RowOptions.__annotations__)
FOREIGN = advice(
    ("routing_key topic subject channel stream list", "use queue"),
    ("exchange", "leave it out, and publish to each queue by its name"),
    ("expiration ttl expires", "use expires_in"),
    ("countdown", "use delay"),
    ("eta", "use next_attempt_at"),
    ("partition partition_key", "use key"),
    ("persist mandatory no_confirm", "leave it out, each publish is stored"),
)
"""Options of other brokers, and what to do here."""


def _given(options: RowOptions) -> dict[str, Any]:
    """Those of `options` that are not None; most messages have none.

    Raises:
        UnknownOptionError: one of another name; also a TypeError.
    """
    if options and not options.keys() <= _OPTIONS:
        refuse_unknown("a publish", options, PublishOptions.__annotations__, FOREIGN)
    return {name: value for name, value in options.items() if value is not None}


OTHERS: Any = object()
"""`only_transaction` of options that have others."""


def only_transaction(options: PublishOptions) -> Any:
    """The connection or session in whose transaction to publish, None for none, if `options` say
    nothing else; else `OTHERS`.

    Raises:
        PublishError: both were given, or one that is not asynchronous.
    """
    if not options:
        return None
    if not options.keys() <= _TRANSACTIONS:
        return OTHERS
    return _one_transaction(options.get("connection"), options.get("session"), with_ack=None)


_TRANSACTIONS = frozenset(("connection", "session"))


def _one_transaction(connection: Any, session: Any, *, with_ack: bool | None) -> Any:
    if connection is None and session is None and with_ack is None:
        return None
    if not isinstance(with_ack, bool | None):
        raise PublishError(f"with_ack must be True or False, got {with_ack!r}")
    if (connection is not None) + (session is not None) + bool(with_ack) > 1:
        raise PublishError(
            "give only one of connection=, session= and with_ack=True: each names a transaction"
        )
    given = connection if connection is not None else session
    if given is not None and not (
        hasattr(given, "sync_connection") or hasattr(given, "sync_session")
    ):
        raise PublishError(
            f"connection and session take an AsyncConnection or AsyncSession, got {given!r}: "
            "use publish_sync for a synchronous one"
        )
    return given
