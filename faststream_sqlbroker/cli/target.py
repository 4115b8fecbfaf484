"""The broker that a command works on, and the connection to it."""

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
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.output import refuse_json
from faststream_sqlbroker.cli.shared_options import ChangeOptions
from faststream_sqlbroker.core.imports import import_object
from faststream_sqlbroker.exceptions import SetupError

T = TypeVar("T")
Action = Callable[[Admin], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Target:
    """The options before the command."""

    app: str | None = None
    url: str | None = None
    message_table: str = "message"
    archive_table: str = "message_archive"
    schema: str | None = None

    @property
    def tables(self) -> SqlBrokerSchemaConfig:
        """Names of the tables, unless an application's broker configures other names."""
        return SqlBrokerSchemaConfig(
            message_table_name=self.message_table,
            message_archive_table_name=self.archive_table,
            schema=self.schema,
        )

    def load_broker(self, logger: logging.Logger | None = None) -> SqlBroker:
        """Return the application's broker, or create a broker for the URL that logs to `logger`.

        Raises:
            SetupError: neither is given, or the broker cannot be created.
        """
        if self.app is not None:
            return _load_broker(self.app)
        if self.url is None:
            raise SetupError(
                "no database given: use --app module:broker, --url with a SQLAlchemy URL, or the "
                "variable SQLBROKER_URL"
            )
        try:
            return SqlBroker(self.url, schema=self.tables, logger=logger)
        except ModuleNotFoundError as error:
            raise SetupError(
                f"the URL needs {error.name!r}, which is not installed: pip install "
                "'sqlbroker[postgresql]', [mysql] or [sqlite]"
            ) from None


def get_target(context: typer.Context) -> Target:
    """Return the options before the command, such as `--url`, which the main callback stored."""
    return Target(*context.obj)


def run(
    context: typer.Context,
    work: Callable[[SqlBroker], Awaitable[T]],
    *,
    logger: logging.Logger | None = None,
) -> T:
    """Run `work` in a new event loop with the command's broker, and close all connections.

    The broker is not started, so it claims nothing. Database errors become errors of this package
    that do not contain the URL.
    """
    target = get_target(context)

    async def run_work() -> T:
        """Create the broker within the event loop, to which the connections will belong."""
        broker = target.load_broker(logger)
        try:
            return await work(broker)
        finally:
            # Close an application's engine as well, because the command ends here.
            await broker.stop()
            await broker.engine.dispose()

    with convert_database_errors():
        return asyncio.run(run_work())


def run_confirmed(
    context: typer.Context,
    options: ChangeOptions,
    text: str,
    change: Action[T],
    precheck: Action[T] | None = None,
) -> T:
    """Validate the arguments, ask, and make the change; `--yes` skips all but the change.

    `precheck` finds out whether there is something to change, such as a held lock. A false result
    is returned without a question.

    Raises:
        SetupError: an argument is not valid, or `--json` was given without `--yes`.
    """
    if not options.yes:
        refuse_json(options.as_json)
        check_arguments(context, [change])
        if precheck and not (result := run(context, lambda broker: precheck(broker.admin))):
            return result
        options.confirm(text)
    return run(context, lambda broker: change(broker.admin))


def check_arguments(context: typer.Context, changes: Iterable[Action[object]]) -> None:
    """Validate the arguments of each change, before the user is asked to confirm.

    Each change runs until its first write: `broker.admin` validates all arguments before that, and
    a store that rejects every call then ends the change.

    Raises:
        SetupError: an argument is not valid.
    """

    async def work(broker: SqlBroker) -> None:
        """Run each change with a store that ends the change at the first write."""
        admin = copy(broker.admin)
        admin.__class__ = _CheckingAdmin
        for change in changes:
            with suppress(_ReachedWriteError):
                await change(admin)

    run(context, work)


class _ReachedWriteError(Exception):
    """A change has validated the arguments and would write now."""


class _RejectingStore:
    """Replaces the store of a change that is only validated."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise _ReachedWriteError


class _CheckingAdmin(Admin):
    """Operations that only validate their arguments: the store for changes rejects each call."""

    _writable_store: Any = _RejectingStore()


def _load_broker(path: str) -> SqlBroker:
    """Import the broker, or the `broker` of an application such as FastStream, from module:name.

    Raises:
        SetupError: it cannot be imported, or is neither.
    """
    value = import_object(path, option="--app")
    broker = value if isinstance(value, SqlBroker) else getattr(value, "broker", None)
    if not isinstance(broker, SqlBroker):
        raise SetupError(
            f"--app {path!r} must name a SqlBroker or an application with a broker, got "
            f"{type(value).__name__}"
        )
    return broker
