"""Which broker a command works on, and how it is reached."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import typer

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.options import Change
from faststream_sqlbroker.cli.output import refuse_json
from faststream_sqlbroker.core.imports import imported
from faststream_sqlbroker.exceptions import SetupError

T = TypeVar("T")
Action = Callable[[Admin], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Target:
    """What the options before the command say."""

    app: str | None = None
    url: str | None = None
    message_table: str = "message"
    archive_table: str = "message_archive"
    schema: str | None = None

    @property
    def tables(self) -> SqlBrokerSchemaConfig:
        """The tables, unless an application's broker names others."""
        return SqlBrokerSchemaConfig(
            message_table_name=self.message_table,
            message_archive_table_name=self.archive_table,
            schema=self.schema,
        )

    def broker(self, logger: logging.Logger | None = None) -> SqlBroker:
        """The application's broker, or one of its own for the URL, which logs to `logger`.

        Raises:
            SetupError: neither is given, or it cannot be made.
        """
        if self.app is not None:
            return _broker_of(self.app)
        if self.url is None:
            raise SetupError(
                "which database? give --app module:broker, or its SQLAlchemy URL by --url or by "
                "the variable SQLBROKER_URL"
            )
        try:
            return SqlBroker(self.url, schema=self.tables, logger=logger)
        except ModuleNotFoundError as error:
            raise SetupError(
                f"the URL needs {error.name!r}, which is not installed: pip install "
                "'sqlbroker[postgresql]', [mysql] or [sqlite]"
            ) from None


def target_of(context: typer.Context) -> Target:
    """What the options before the command of this context said."""
    return Target(*context.obj)


def run(
    context: typer.Context,
    work: Callable[[SqlBroker], Awaitable[T]],
    *,
    logger: logging.Logger | None = None,
) -> T:
    """Do `work` with the command's broker, which is not started, and close its connections.

    Errors of the database are errors of this package, without the URL.
    """
    target = target_of(context)

    async def working() -> T:
        broker = target.broker(logger)
        try:
            return await work(broker)
        finally:
            # An application's engine is closed, too: the command ends here.
            await broker.stop()
            await broker.engine.dispose()

    with database_errors():
        return asyncio.run(working())


def run_confirmed(
    context: typer.Context, how: Change, text: str, change: Action[T], look: Action[T] | None = None
) -> T:
    """Check what was given, show the text, ask, and make the change; with `--yes` only make it.

    What `look` returns is returned if it is false: there is nothing to change, and no question.

    Raises:
        SetupError: what was given is not valid, or the output is for a program.
    """
    if not how.yes:
        refuse_json(how.as_json)
        check(context, [change])
        if look and not (there := run(context, lambda broker: look(broker.admin))):
            return there
        how.confirm(text)
    return run(context, lambda broker: change(broker.admin))


def check(context: typer.Context, changes: Iterable[Action[object]]) -> None:
    """Check what was given for each change, which ends before it writes anything.

    Raises:
        SetupError: what was given is not valid.
    """

    async def work(broker: SqlBroker) -> None:
        admin = copy(broker.admin)
        admin.__class__ = _Checks
        for change in changes:
            with suppress(_ReachedWriteError):
                await change(admin)

    run(context, work)


class _ReachedWriteError(Exception):
    """A change has checked what it was given, and would write now."""


class _NoStore:
    """Stands for the store of a change that is only checked."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise _ReachedWriteError


class _Checks(Admin):
    _changing: Any = _NoStore()


def _broker_of(path: str) -> SqlBroker:
    found = imported(path, what="--app")
    broker = found if isinstance(found, SqlBroker) else getattr(found, "broker", None)
    if not isinstance(broker, SqlBroker):
        raise SetupError(
            f"--app {path!r} must be a SqlBroker or an application with one, got "
            f"{type(found).__name__}"
        )
    return broker
