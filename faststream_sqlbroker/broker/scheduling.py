"""`schedule` and `publish_on_schedule` of the broker and its routers."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any, TypedDict, TypeVar, cast

from typing_extensions import Unpack

from faststream_sqlbroker.core.checks import check_choice, reject_unknown_options, validate_name
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import MISSED_RUNS, MissedRuns
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.flow.own_context import run_closable
from faststream_sqlbroker.flow.tasks.cron import Cron
from faststream_sqlbroker.flow.tasks.schedules import DeclaredSchedule
from faststream_sqlbroker.flow.threads import run_in_tracked_thread
from faststream_sqlbroker.publisher.rows import make_row
from faststream_sqlbroker.response import SqlBrokerPublishCommand

F = TypeVar("F", bound=Callable[..., Any])
MakeBody = Callable[[datetime], Awaitable[Any]]

NAME_HEADER = "schedule"
TIME_HEADER = "fire-time"


class ScheduleOptions(TypedDict, total=False):
    """Options of the messages of a schedule; None is the same as omitting an option."""

    headers: dict[str, Any] | None
    """JSON values by name; `schedule` and `fire-time` are added."""
    reply_to: str
    """The queue for the handler's answer."""
    priority: int | None
    """The priority, -100 to 100; higher priorities are claimed first. Default 0."""
    key: str | None
    """The subject of the message, such as a customer id: 1 to 255 characters."""
    destination: str | None
    """Full name of the final queue of the message: a subscriber of the schedule's queue with
    forward_to=DESTINATION moves the message there.
    """
    delay: Duration | None
    """Time from the publish until the message is due: seconds, a timedelta or text like "1.5h"; a
    negative value means now.
    """
    expires_in: Duration | None
    """Time after which no handler starts for the message; greater than 0."""


class SqlBrokerScheduling:
    """Schedules of messages; each fire time is published once by any number of processes."""

    def publish_on_schedule(
        self,
        name: str,
        expression: str,
        queue: str,
        message: Any = None,
        *,
        tz: str = "UTC",
        missed: MissedRuns = "one",
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Publish `message` at the times of a cron expression, while any process runs.

        Each fire time is published once, in the transaction that marks it as done. Times are by the
        database's clock. The message has the headers `schedule` (the name) and `fire-time` (ISO
        8601, UTC). Declare the schedule before `start`, in every process that may publish it.

        Args:
            name: The schedule's name in all processes, 1 to 255 characters. It identifies the
                schedule's state in the database.
            expression: Five fields, minute hour day-of-month month day-of-week, or six fields with
                the second first. A changed expression takes effect when a process with it starts;
                due fire times of the old expression are published before.
            queue: The queue; a router's prefix is prepended.
            message: The body: bytes and str unchanged, anything else as JSON.
            tz: The time zone of the expression: a name in the IANA database.
            missed: Treatment of fire times that are a minute late or more because no process ran:
                "one" publishes the latest, "all" publishes up to 1 000, "skip" publishes none.
            options: See `ScheduleOptions`.

        Raises:
            SetupError: an argument is not valid, or the name is already declared.
            MissingExtraError: cronsim is not installed.
        """

        async def get_message(_fire_at: datetime) -> Any:
            return message

        self._add_schedule(name, expression, queue, get_message, tz, missed, options)

    def schedule(
        self,
        expression: str,
        *,
        queue: str,
        tz: str = "UTC",
        missed: MissedRuns = "one",
        name: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Callable[[F], F]:
        """Publish the return value of the decorated function at the times of a cron expression.

        The publishing process calls the function first. A function with an argument gets the fire
        time (aware, in `tz`). A synchronous function runs in a thread. An error is logged, and the
        fire time is tried again after 1 to 30 seconds, by any process, until the function returns.
        The function is called again for the same fire time after a crash, or if the schedule was
        redefined during the call. It may return a `SqlBrokerResponse`.

        Args:
            expression: As for `publish_on_schedule`.
            queue: As for `publish_on_schedule`.
            tz: As for `publish_on_schedule`.
            missed: As for `publish_on_schedule`.
            name: As for `publish_on_schedule`; default: the function's module and qualified name.
            options: See `ScheduleOptions`.

        Raises:
            SetupError: an argument is not valid, the name is already declared, or the function
                needs more than one argument.
            MissingExtraError: cronsim is not installed.
        """
        # Checked here as well, so that the error points at the line of the decorator.
        Cron(expression, tz)

        def decorate(function: F) -> F:
            schedule_name = name if name is not None else _get_function_name(function)
            self._add_schedule(
                schedule_name, expression, queue, _make_body_factory(function), tz, missed, options
            )
            return function

        return decorate

    @property
    def schedules(self) -> list[DeclaredSchedule]:
        """The schedules declared here and in included routers."""
        routers: list[Any] = cast("Any", self).routers
        return [
            *self._schedules,
            *(s for router in routers for s in getattr(router, "schedules", ())),
        ]

    @cached_property
    def _schedules(self) -> list[DeclaredSchedule]:
        return []

    def _add_schedule(
        self,
        name: str,
        expression: str,
        queue: str,
        body: MakeBody,
        tz: str,
        missed: MissedRuns,
        options: Any,
    ) -> None:
        """Check and store a schedule, which starts with the broker.

        `body` is called at each fire time, before the message is created.
        """
        cron = Cron(expression, tz)
        _check_schedule(
            name, queue, missed, options, [schedule.name for schedule in self._schedules]
        )
        self._schedules.append(
            DeclaredSchedule(
                name, cron, missed, partial(self._make_messages, name, queue, body, options)
            )
        )

    async def _make_messages(
        self,
        name: str,
        queue: str,
        body: MakeBody,
        schedule_options: ScheduleOptions,
        fire_at: datetime,
    ) -> Sequence[NewMessage]:
        """Create the message of a fire time; return an empty list if a middleware drops it.

        The scheduler calls it when the cron expression is due, and writes the message in the
        transaction that records the fire time. The middlewares therefore get a publish that only
        collects the row.
        """
        config: Any = cast("Any", self).config
        rows: list[NewMessage] = []

        async def add_row(cmd: SqlBrokerPublishCommand) -> None:
            rows.append(await config.producer.make_row(cmd))

        schedule_headers = {
            NAME_HEADER: name,
            TIME_HEADER: fire_at.astimezone(timezone.utc).isoformat(),
        }
        options: Any = {
            **schedule_options,
            "headers": {**(schedule_options.get("headers") or {}), **schedule_headers},
        }
        cmd = SqlBrokerPublishCommand(
            await body(fire_at), queue=f"{config.prefix}{queue}", **options
        )
        cmd.codec = config.broker_codec
        cmd.id_generator = config.id_generator
        publish: Any = add_row
        for middleware in config.broker_middlewares[::-1]:
            publish = partial(middleware(None, context=config.context).publish_scope, publish)
        await publish(cmd)
        return rows


def _check_schedule(
    name: object,
    queue: object,
    missed: object,
    options: dict[str, Any],
    existing_names: Sequence[str],
) -> None:
    """Check the arguments of a schedule at the declaration, not at the first fire time.

    The message's options are checked by creating a row with an empty body.
    """
    validate_name(name, "the name of a schedule")
    if name in existing_names:
        raise SetupError(
            f"the schedule {format_value(name)} is declared twice: give each its own name"
        )
    check_choice("missed", missed, MISSED_RUNS)
    reject_unknown_options("a schedule", options, ScheduleOptions.__annotations__, {})
    try:
        make_row(
            queue,
            b"",
            None,
            {
                k: v
                for k, v in options.items()
                if v is not None and k not in {"headers", "reply_to"}
            },
            headers=options.get("headers"),
            reply_to=options.get("reply_to") or "",
        )
    except PublishError as error:
        raise SetupError(str(error)) from error


def _get_function_name(function: Any) -> str:
    """Return the default name of a function's schedule: module and qualified name.

    The name identifies the schedule in the database, so it must be the same in all processes and
    after each start.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not module or not name:
        raise SetupError(
            f"the function {format_value(function)} has no name: name its schedule with name="
        )
    return f"{module}.{name}"


def _make_body_factory(function: Any) -> MakeBody:
    """Return a coroutine function that calls `function` and returns the message's body.

    A synchronous function runs in a thread. The result may be awaitable.
    """
    takes_fire_time = _accepts_fire_time(function)
    # An object may have an async `__call__`.
    method = getattr(function, "__call__", None)  # noqa: B004 - not a test for being callable
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)

    async def call(fire_at: datetime) -> Any:
        """Return the body of the message for the fire time `fire_at`."""
        arguments = (fire_at,) if takes_fire_time else ()
        result = (
            function(*arguments) if is_async else await run_in_tracked_thread(function, *arguments)
        )
        # A broker that stops can close this coroutine, even if the function ignores a cancel.
        if inspect.iscoroutine(result):
            return await run_closable(result)
        return await result if inspect.isawaitable(result) else result

    return call


def _accepts_fire_time(function: Any) -> bool:
    """Return True if `function` accepts the fire time, False for a function without arguments.

    The fire time is the time of the cron expression for which the function is called. Any other
    function is refused, because the scheduler could not call it.
    """
    if not callable(function):
        raise SetupError(f"a schedule must decorate a function, got {format_value(function)}")
    signature = inspect.signature(function)
    # Try the call with the fire time first, then the call without an argument.
    for arguments in ([None], []):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
    ]
    raise SetupError(
        "the function of a schedule must accept the fire time or no arguments; "
        f"{format_value(function)} needs {', '.join(required)}"
    )


_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
"""`*args` and `**kwargs`, which need no argument."""
