"""`sqlbroker serve --config`: runs what a file of YAML describes."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.listening import (
    listening,
    refuse_without_tables,
    tell_address,
    tls_options,
)
from faststream_sqlbroker.cli.session import database_errors
from faststream_sqlbroker.cli.shown import print_line
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.config import Service
    from faststream_sqlbroker.config.models import HttpSection

STOPPED_BY = (signal.SIGINT, signal.SIGTERM)


def run_service(path: Path) -> None:
    """Handle the queues of the file, and serve HTTP if it says so, until a signal.

    Raises:
        SetupError: the file cannot be read, or has mistakes.
        MissingExtraError: an extra that it needs is not installed.
    """
    from faststream_sqlbroker.config import read_service  # noqa: PLC0415 - an extra

    service = read_service(path)
    with database_errors():
        asyncio.run(_run(service))
    print_line("stopped")


def refuse_more_options(context: typer.Context) -> None:
    """Refuse options that the file has its own words for.

    Raises:
        SetupError: there are some; the variable SQLBROKER_URL is none.
    """
    at: typer.Context | None = context
    while at is not None:
        for parameter in at.command.params:
            source = at.get_parameter_source(parameter.name or "")
            given = source is not None and source.name == "COMMANDLINE"
            if given and parameter.name != "config":
                raise SetupError(
                    f"--config takes no {parameter.opts[0]}: the file says what is served, and how"
                )
        at = at.parent  # type: ignore[assignment]


async def _run(service: "Service") -> None:
    broker = service.broker(SqlBroker, {})
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOPPED_BY:
        # Windows has none of these; there an interrupt ends the program.
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, _stop_once, loop, stop)
    try:
        await refuse_without_tables(broker)
        http = service.config.http
        if http is None:
            await broker.start()
            print_line(f"handling {len(service.config.queues)} queues")
            await stop.wait()
        else:
            await _serve(service, http, broker, stop)
    finally:
        await broker.stop()


def _stop_once(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop; a second signal ends the process at once, so that leases end by their time."""
    for number in STOPPED_BY:
        loop.remove_signal_handler(number)
        # Python's own handler of SIGINT would wait for the broker's stop.
        signal.signal(number, signal.SIG_DFL)
    print_line("stopping; a second signal ends at once")
    stop.set()


async def _serve(
    service: "Service", http: "HttpSection", broker: SqlBroker, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set; the broker starts once the port is there."""
    from faststream_sqlbroker.http.server import InnerServer  # noqa: PLC0415 - an extra

    files = (Path(name) if name else None for name in (http.certificate, http.key))
    tls = tls_options(*files)
    app = service.application(broker)
    config, listener = listening(app, http.host, http.port, tls)
    server = InnerServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await broker.start()
        tell_address(http.host, listener, tls)
        print_line(f"handling {len(service.config.queues)} queues")
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving
