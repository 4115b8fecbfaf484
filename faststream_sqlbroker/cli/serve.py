"""`sqlbroker serve`: serve the broker, or a service from a YAML file, over HTTP.

`sqlbroker hash-password` hashes passwords for its users.
"""

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.listening import (
    build_tls_options,
    check_tables,
    create_server_config,
    print_address,
)
from faststream_sqlbroker.cli.output import print_line
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.channels import Channels, Queues
from faststream_sqlbroker.core.imports import import_object
from faststream_sqlbroker.core.text import format_value, pluralize
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.config import ConfiguredService
    from faststream_sqlbroker.config.sections import HttpSection


USER_FIELDS = 3
"""Fields in a line of a user file."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file that describes the service, instead of all other options."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 selects a free port.", min=0, max=65535)
    ] = 8080,
    users: Annotated[
        Path | None,
        typer.Option(help="File of users; each line has a name, a role and a password hash."),
    ] = None,
    auth: Annotated[
        str | None, typer.Option(help="Value for auth of `broker.asgi`, as module:name.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No authentication; serve this machine only.")
    ] = False,
    channels: Annotated[
        bool,
        typer.Option(
            "--channels", help="Serve channels, whose pull consumers administrators create."
        ),
    ] = False,
    queues: Annotated[
        bool,
        typer.Option(
            "--queues", help="Serve queues to clients with tokens that administrators create."
        ),
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="TLS certificate, as a PEM file.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Private key of the certificate, as a PEM file.")
    ] = None,
    proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--proxies",
            help="Proxy address or network whose X-Forwarded-For is trusted; repeat for several.",
        ),
    ] = None,
) -> None:
    """Serve the broker over HTTP until it is interrupted.

    This process handles messages only if the file of --config has queues.

    Give one of --config, --users, --auth and --insecure.

    `sqlbroker hash-password` creates the hashes for --users.
    """
    if config is not None:
        refuse_more_options(context)
        run_service(config)
        return
    tls = build_tls_options(certificate, key)
    with convert_database_errors():
        checked_auth = _load_auth(users, auth, insecure=insecure, host=host)

    async def work(broker: SqlBroker) -> None:
        """Check the tables, connect, and serve until a signal; the broker claims no messages."""
        # Only this method accepts a missing authentication.
        app = broker._make_standalone_app(  # noqa: SLF001
            checked_auth,
            Channels() if channels else None,
            Queues() if queues else None,
            proxies=proxies or (),
        )
        await check_tables(broker)
        await broker.connect()
        await _run_server(app, host, port, tls)

    try:
        # Without a handler, warnings go to stderr: this is "the server's log" of responses.
        run(context, work, logger=logging.getLogger("faststream_sqlbroker"))
    except KeyboardInterrupt:
        print_line("stopped")


def hash_password(
    password: Annotated[
        str | None,
        typer.Option(help="Prompted for if omitted, which keeps it out of the process list."),
    ] = None,
) -> None:
    """Print the hash of a password, for the file of `serve --users` and for `Login`."""
    try:
        from faststream_sqlbroker.http import hash_password as create_hash  # noqa: PLC0415 - an extra
    except MissingExtraError as error:
        raise SetupError(str(error)) from None
    if password is None:
        # Prompt on stderr, because a script reads the hash from stdout.
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    typer.echo(create_hash(password))


def _load_auth(users: Path | None, auth: str | None, *, insecure: bool, host: str) -> Any:
    """Return the authentication that the options select.

    None is never accepted: without `--insecure`, a forgotten option must not open the server.

    Raises:
        SetupError: not exactly one of the three options is given, or its value is not valid.
    """
    from faststream_sqlbroker import http  # noqa: PLC0415 - an extra
    from faststream_sqlbroker.http.app import authentication  # noqa: PLC0415
    from faststream_sqlbroker.http.local import LocalOnly, is_loopback  # noqa: PLC0415

    if [users is not None, auth is not None, insecure].count(True) != 1:
        raise SetupError(
            "serve needs authentication: give one of --config FILE, --users FILE, "
            "--auth module:name, or --insecure to serve this machine only"
        )
    if insecure:
        if not is_loopback(host):
            raise SetupError(
                f"--insecure listens on this machine only, got --host {format_value(host)}: omit "
                "--host, or give --users"
            )
        return LocalOnly()
    if auth is not None:
        return authentication(import_object(auth, option="--auth"))
    assert users is not None  # noqa: S101 - counted above
    return http.BasicAuth(_read_logins(users))


def _read_logins(path: Path) -> list[Any]:
    """Read the users in a file: a name, a role and a password hash on each line.

    Empty lines and lines that begin with # are skipped.

    Raises:
        SetupError: the file cannot be read, or a line is not valid; the message has its number.
    """
    from faststream_sqlbroker.http import Login  # noqa: PLC0415 - an extra

    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--users {path} cannot be read: {error}") from None
    logins = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != USER_FIELDS:
            raise SetupError(
                f"{path}, line {number}: must be a name, a role and a hash, got {len(fields)} words"
            )
        try:
            logins.append(Login(*fields))
        except SetupError as error:
            raise SetupError(f"{path}, line {number}: {error}") from None
    return logins


async def _run_server(app: Any, host: str, port: int, tls: dict[str, Any]) -> None:
    """Serve until a signal; the broker is connected, but not started, and claims no messages."""
    from faststream_sqlbroker.http.server import InnerServer  # noqa: PLC0415 - an extra

    config, listener = create_server_config(app, host, port, tls)
    server = InnerServer(config)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        # Windows has no signal handlers in loops; there an interrupt ends the program.
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, server.handle_exit, number, None)
    # After the signal handlers: a reader of this line may send a signal immediately.
    print_address(host, listener, tls)
    await server.serve(sockets=[listener])
    print_line("stopped")


def run_service(path: Path) -> None:
    """Handle the queues of the file until a signal, and serve HTTP if the file says so.

    Raises:
        SetupError: the file cannot be read, or has mistakes.
        MissingExtraError: an extra that the file needs is not installed.
    """
    from faststream_sqlbroker.config import read_service  # noqa: PLC0415 - an extra

    service = read_service(path)
    with convert_database_errors():
        asyncio.run(_run_service(service))
    print_line("stopped")


def refuse_more_options(context: typer.Context) -> None:
    """Refuse options next to `--config`, including the options before the command.

    The file describes the complete service, so an option on the command line would have no effect.
    Click has a context for each word of the command; the parents have the options before it.

    Raises:
        SetupError: an option is given on the command line; SQLBROKER_URL is ignored.
    """
    current: typer.Context | None = context
    while current is not None:
        for parameter in current.command.params:
            source = current.get_parameter_source(parameter.name or "")
            is_given = source is not None and source.name == "COMMANDLINE"
            if is_given and parameter.name != "config":
                raise SetupError(
                    f"--config cannot be combined with {parameter.opts[0]}: set it in the file"
                )
        current = current.parent  # type: ignore[assignment]


async def _run_service(service: "ConfiguredService") -> None:
    """Run the service of a YAML file until a signal, and then stop the broker.

    The first signal ends it gracefully: running handlers may finish. HTTP is served only if the
    file has a section `http`.
    """
    broker = service.broker(SqlBroker, {})
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        # Windows has no signal handlers in loops; there an interrupt ends the program.
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, _stop_once, loop, stop)
    try:
        await check_tables(broker)
        http = service.config.http
        if http is None:
            await broker.start()
            print_line(f"handling {pluralize(len(service.config.queues), 'queues')}")
            await stop.wait()
        else:
            await _serve_http(service, http, broker, stop)
    finally:
        await broker.stop()


def _stop_once(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Request a graceful stop, and restore the default action of the signals.

    So a second signal ends the process immediately; its leases then expire by time.
    """
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        # Python's default SIGINT handler would wait for the broker's stop.
        signal.signal(number, signal.SIG_DFL)
    print_line("stopping; a second signal ends the process immediately")
    stop.set()


async def _serve_http(
    service: "ConfiguredService", http: "HttpSection", broker: SqlBroker, stop: asyncio.Event
) -> None:
    """Serve HTTP and handle messages until `stop` is set, or the server ends by itself.

    The broker starts after the port is bound, so a port in use ends the command before a claim.
    """
    from faststream_sqlbroker.http.server import InnerServer  # noqa: PLC0415 - an extra

    files = (Path(name) if name else None for name in (http.certificate, http.key))
    tls = build_tls_options(*files)
    app = service.application(broker)
    config, listener = create_server_config(app, http.host, http.port, tls)
    server = InnerServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await broker.start()
        print_address(http.host, listener, tls)
        print_line(f"handling {pluralize(len(service.config.queues), 'queues')}")
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        stopping.cancel()
        await serving
