"""`sqlbroker serve`: the broker over HTTP, in a process of its own, or with --config what a file of
YAML describes; and passwords for it.
"""

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.listening import (
    listening,
    refuse_without_tables,
    tell_address,
    tls_options,
)
from faststream_sqlbroker.cli.output import print_line
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.channels import Channels, Queues
from faststream_sqlbroker.core.imports import imported
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.config import Service
    from faststream_sqlbroker.config.models import HttpSection


FIELDS = 3
"""Words in a line of a file of users."""
STOPPED_BY = (signal.SIGINT, signal.SIGTERM)


def serve(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="A service in a file of YAML; it says all that options would say."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    users: Annotated[
        Path | None,
        typer.Option(help="A file of users: in each line a name, a role and a hash."),
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(help="What `broker.asgi` takes as auth, as module:name."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Without authentication; only from this machine."),
    ] = False,
    channels: Annotated[
        bool,
        typer.Option("--channels", help="Channels with pull consumers, made by administrators."),
    ] = False,
    queues: Annotated[
        bool,
        typer.Option("--queues", help="Queues for clients, with tokens made by administrators."),
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="The certificate of TLS, as PEM.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its private key, as PEM.")] = None,
    proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--proxies",
            help="A proxy's address or network, whose X-Forwarded-For is trusted; may be repeated.",
        ),
    ] = None,
) -> None:
    """Serve the broker over HTTP until it is interrupted.

    No message is handled here, unless the file of --config says so.

    One of --config, --users, --auth and --insecure is needed.

    `sqlbroker hash-password` makes the hashes of --users.
    """
    if config is not None:
        refuse_more_options(context)
        run_service(config)
        return
    tls = tls_options(certificate, key)
    with database_errors():
        known = _known(users, auth, insecure=insecure, host=host)

    async def work(broker: SqlBroker) -> None:
        # The only way without authentication, which is refused in any other place.
        served = broker._asgi_alone(  # noqa: SLF001
            known,
            Channels() if channels else None,
            Queues() if queues else None,
            proxies=proxies or (),
        )
        await refuse_without_tables(broker)
        await broker.connect()
        await _serve(served, host, port, tls)

    try:
        # Without a handler warnings go to standard error: answers refer to "the server's log".
        run(context, work, logger=logging.getLogger("faststream_sqlbroker"))
    except KeyboardInterrupt:
        print_line("stopped")


def hash_password(
    password: Annotated[
        str | None,
        typer.Option(help="Asked for if not given, which keeps it out of the list of processes."),
    ] = None,
) -> None:
    """Print the hash of a password, for the file of `serve --users` and for `Login`."""
    try:
        from faststream_sqlbroker.http import hash_password as hashed  # noqa: PLC0415 - an extra
    except MissingExtraError as error:
        raise SetupError(str(error)) from None
    if password is None:
        # Not to stdout: a script takes the hash from there.
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    typer.echo(hashed(password))


def _known(users: Path | None, auth: str | None, *, insecure: bool, host: str) -> Any:
    """Who may ask.

    Raises:
        SetupError: not exactly one of the three options is given, or it is not valid.
    """
    from faststream_sqlbroker import http  # noqa: PLC0415 - an extra
    from faststream_sqlbroker.http.app import authentication  # noqa: PLC0415
    from faststream_sqlbroker.http.local import LocalOnly, is_loopback  # noqa: PLC0415

    if [users is not None, auth is not None, insecure].count(True) != 1:
        raise SetupError(
            "serve needs authentication: give one of --config FILE, --users FILE, "
            "--auth module:name, or --insecure for yourself on this machine"
        )
    if insecure:
        if not is_loopback(host):
            raise SetupError(
                f"--insecure listens on this machine only, got --host {short(host)}: leave --host "
                "out, or give --users"
            )
        return LocalOnly()
    if auth is not None:
        return authentication(imported(auth, what="--auth"))
    assert users is not None  # noqa: S101 - counted above
    return http.BasicAuth(_logins(users))


def _logins(path: Path) -> list[Any]:
    """The users in a file.

    Raises:
        SetupError: it cannot be read, or a line is not valid; the text names the line's number.
    """
    from faststream_sqlbroker.http import Login  # noqa: PLC0415 - an extra

    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--users {path} cannot be read: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != FIELDS:
            raise SetupError(
                f"{path}, line {number}: a line has a name, a role and a hash, this has "
                f"{len(words)} words"
            )
        try:
            found.append(Login(*words))
        except SetupError as error:
            raise SetupError(f"{path}, line {number}: {error}") from None
    return found


async def _serve(app: Any, host: str, port: int, tls: dict[str, Any]) -> None:
    from faststream_sqlbroker.http.server import InnerServer  # noqa: PLC0415 - an extra

    config, listener = listening(app, host, port, tls)
    server = InnerServer(config)
    loop = asyncio.get_running_loop()
    for number in STOPPED_BY:
        # Windows has none of these; there an interrupt ends the program.
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, server.handle_exit, number, None)
    # Not before: a signal of who reads it would end the process by force.
    tell_address(host, listener, tls)
    await server.serve(sockets=[listener])
    print_line("stopped")


def run_service(path: Path) -> None:
    """Handle the queues of the file, and serve HTTP if it says so, until a signal.

    Raises:
        SetupError: the file cannot be read, or has mistakes.
        MissingExtraError: an extra that it needs is not installed.
    """
    from faststream_sqlbroker.config import read_service  # noqa: PLC0415 - an extra

    service = read_service(path)
    with database_errors():
        asyncio.run(_run_service(service))
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


async def _run_service(service: "Service") -> None:
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
            await _serve_service(service, http, broker, stop)
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


async def _serve_service(
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
