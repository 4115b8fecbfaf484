"""`schedule` and `publish_on_schedule`, for the broker and its routers."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, TypedDict, TypeVar, cast

from typing_extensions import Unpack

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import MISSED, Missed
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.flow.cron import Cron
from faststream_sqlbroker.flow.schedules import Planned
from faststream_sqlbroker.publisher.rows import make_row, new_correlation_id
from faststream_sqlbroker.response import SqlBrokerPublishCommand

F = TypeVar("F", bound=Callable[..., Any])
MakeBody = Callable[[datetime], Awaitable[Any]]

NAME_HEADER, TIME_HEADER = "schedule", "fire-time"


class ScheduleOptions(TypedDict, total=False):
    """Keyword arguments of the messages of a schedule; all may be left out, None is the same as
    left out.
    """

    headers: dict[str, Any] | None
    """JSON values by name; `schedule` and `fire-time` are added."""
    reply_to: str
    """Queue for the handler's answer."""
    priority: int | None
    """-100 to 100; higher ones are claimed first. Default 0."""
    key: str | None
    """1 to 255 characters; what the message is about."""
    delay: Duration | None
    """Time from the publish until it is due: seconds, a timedelta or text like "1.5h"; a negative
    one is at once."""
    expires_in: Duration | None
    """Time after which no handler is started for it any more; longer than 0."""


class SqlBrokerScheduling:
    """Messages that are published at set times, each time once, however many processes run."""

    def publish_on_schedule(
        self,
        name: str,
        expression: str,
        queue: str,
        message: Any = None,
        *,
        tz: str = "UTC",
        missed: Missed = "one",
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Publish `message` at the times of a cron expression, while the broker runs anywhere.

        Each fire time is published once, in the transaction that marks it as done. Times are the
        database's. The message has the headers `schedule` (the name) and `fire-time` (ISO 8601,
        UTC). Declare it before `start`, in every process that may fire it.

        Args:
            name: Names the schedule in the whole fleet, 1 to 255 characters: what it has done is
                remembered by it.
            expression: Five fields, minute hour day-of-month month day-of-week, or six with the
                second first. A changed one takes effect when a process with it starts, after what
                is due by the old one.
            queue: Where to; a router's prefix goes before it.
            message: The body: bytes and str as they are, anything else as JSON.
            tz: A name of the IANA database, in whose time the expression is meant.
            missed: What fire times become that are a minute late or more, as nobody ran: "one"
                message for the latest of them, "all" (the newest 1 000) or "skip".
            options: See `ScheduleOptions`.

        Raises:
            SetupError: an argument that cannot be used, or a name that is declared already.
            MissingExtraError: cronsim is not installed.
        """

        async def give(_fire_at: datetime) -> Any:
            return message

        self._plan(name, expression, queue, give, tz, missed, options)

    def schedule(
        self,
        expression: str,
        *,
        queue: str,
        tz: str = "UTC",
        missed: Missed = "one",
        name: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Callable[[F], F]:
        """Publish what the decorated function returns at the times of a cron expression; see
        `publish_on_schedule`.

        The process that fires calls the function first, with the fire time (aware, in `tz`) if it
        takes an argument; one that is not async runs in a thread. What it raises is logged, and the
        fire time is tried again after 1 to 30 seconds, by whichever process, until a message can be
        made. After a crash, or when the schedule is redefined meanwhile, it is called again. It may
        return a `SqlBrokerResponse`.

        Args:
            expression: As there.
            queue: As there.
            tz: As there.
            missed: As there.
            name: As there; default the function's module and qualified name.
            options: As there.

        Raises:
            SetupError: an argument that cannot be used, a name that is declared already, or (when
                it decorates) a function that needs more than one argument.
            MissingExtraError: cronsim is not installed.
        """
        Cron(expression, tz)

        def decorate(function: F) -> F:
            own = name if name is not None else _name_of(function)
            self._plan(own, expression, queue, _body_of(function), tz, missed, options)
            return function

        return decorate

    @property
    def schedules(self) -> list[Planned]:
        """The schedules declared here, those of included routers too."""
        routers: list[Any] = cast("Any", self).routers
        return [
            *self._schedules,
            *(s for router in routers for s in getattr(router, "schedules", ())),
        ]

    @cached_property
    def _schedules(self) -> list[Planned]:
        return []

    def _plan(
        self,
        name: str,
        expression: str,
        queue: str,
        body: MakeBody,
        tz: str,
        missed: Missed,
        given: Any,
    ) -> None:
        cron = Cron(expression, tz)
        _check(name, queue, missed, given, [planned.name for planned in self._schedules])
        self._schedules.append(
            Planned(name, cron, missed, partial(self._make, name, queue, body, given))
        )

    async def _make(
        self, name: str, queue: str, body: MakeBody, given: ScheduleOptions, fire_at: datetime
    ) -> Sequence[NewMessage]:
        """The message of a fire time, through the middlewares of publishing: none if one of them
        swallows it.
        """
        config: Any = cast("Any", self).config
        rows: list[NewMessage] = []

        async def keep(cmd: SqlBrokerPublishCommand) -> None:
            rows.append(await config.producer.make_row(cmd))

        own = {NAME_HEADER: name, TIME_HEADER: fire_at.astimezone(timezone.utc).isoformat()}
        options: Any = {**given, "headers": {**(given.get("headers") or {}), **own}}
        cmd = SqlBrokerPublishCommand(
            await body(fire_at), queue=f"{config.prefix}{queue}", **options
        )
        cmd.codec = config.broker_codec
        cmd.correlation_id = cmd.correlation_id or new_correlation_id(config)
        publish: Any = keep
        for middleware in config.broker_middlewares[::-1]:
            publish = partial(middleware(None, context=config.context).publish_scope, publish)
        await publish(cmd)
        return rows


def _check(
    name: object, queue: object, missed: object, given: dict[str, Any], known: Sequence[str]
) -> None:
    if (problem := name_problem(name)) is not None:
        raise SetupError(f"{short(name)} cannot be the name of a schedule: {problem}")
    if name in known:
        raise SetupError(f"the schedule {short(name)} is declared twice: give each its own name")
    if missed not in MISSED:
        raise SetupError(
            f"missed must be one of {', '.join(map(repr, MISSED))}, got {short(missed)}"
        )
    for option in given:
        if option not in ScheduleOptions.__annotations__:
            allowed = ", ".join(ScheduleOptions.__annotations__)
            raise SetupError(f"a schedule has no option {option!r}; there are {allowed}")
    try:
        make_row(
            queue,
            b"",
            None,
            {k: v for k, v in given.items() if v is not None and k not in {"headers", "reply_to"}},
            headers=given.get("headers"),
            reply_to=given.get("reply_to") or "",
        )
    except PublishError as error:
        raise SetupError(str(error)) from error


def _name_of(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name:
        raise SetupError(
            f"{short(function)} has no name of its own: give the schedule one by name="
        )
    return f"{module}.{name}"


def _body_of(function: Any) -> MakeBody:
    """`function`, with the fire time if it takes one; in a thread unless it is async."""
    takes = _takes_an_argument(function)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - whether an object is called asynchronously
    )

    async def call(fire_at: datetime) -> Any:
        arguments = (fire_at,) if takes else ()
        found = function(*arguments) if is_async else await asyncio.to_thread(function, *arguments)
        return await found if inspect.isawaitable(found) else found

    return call


def _takes_an_argument(function: Any) -> bool:
    if not callable(function):
        raise SetupError(f"a schedule decorates a function, got {short(function)}")
    parameters = inspect.signature(function).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [p for p in parameters if p.kind in kinds]
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    if len(needed) > 1 or (needed and needed[0] not in positional):
        names = ", ".join(p.name for p in needed)
        raise SetupError(
            f"the function of a schedule is called with the fire time, or with nothing; {short(function)} needs {names}"
        )
    return bool(positional) or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
