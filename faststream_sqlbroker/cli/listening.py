"""The server of `sqlbroker serve`: its address, its limits and TLS, and what it needs."""

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.output import print_line
from faststream_sqlbroker.exceptions import SchemaError, SetupError, StoreError
from faststream_sqlbroker.schema.validate import advice, are_missing

if TYPE_CHECKING:
    import uvicorn

IDLE_TIMEOUT = 5
"""Seconds for which uvicorn keeps a connection without a request."""
MOST_CONNECTIONS = 500
"""Connections at a time; more are refused with 503."""
LAST_ANSWERS = 5
"""Seconds for which a stop waits for answers that are under way."""
MISSING = (
    "the broker's tables are missing in this database: create them by `sqlbroker migrate`, with "
    "the same URL and names of tables (it needs the extra 'migrations'), or by your own Alembic"
)


def listening(
    app: Any, host: str, port: int, tls: dict[str, Any]
) -> "tuple[uvicorn.Config, socket.socket]":
    """Uvicorn's configuration, and a socket that listens.

    Raises:
        SetupError: the port cannot be taken, or the certificate or its key cannot be used.
    """
    import uvicorn  # noqa: PLC0415 - an extra

    from faststream_sqlbroker.http.server import LimitedProtocol, bound  # noqa: PLC0415 - as above

    # The peer's address must be the true one: it decides whether a header is trusted.
    config = uvicorn.Config(
        app,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        # Always the same one: another parser, if it is installed, has no limit of a head.
        http=LimitedProtocol,
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=IDLE_TIMEOUT,
        timeout_graceful_shutdown=LAST_ANSWERS,
        **tls,
    )
    try:
        config.load()
    except ssl.SSLError as error:
        raise SetupError(
            f"TLS cannot use {config.ssl_certfile} with {config.ssl_keyfile}: "
            f"{error.reason or error}: give both as PEM, and the certificate's own key"
        ) from None
    return config, bound("port", host, port)


def tell_address(host: str, listener: socket.socket, tls: dict[str, Any]) -> None:
    """Print where it is served."""
    from faststream_sqlbroker.http.local import is_loopback  # noqa: PLC0415 - an extra

    kind = "https" if tls else "http"
    shown = f"[{host}]" if ":" in host else host
    print_line(f"serving {kind}://{shown}:{listener.getsockname()[1]}")
    if not tls and not is_loopback(host):
        print_line("warning: without TLS, passwords can be read on their way: give a certificate")


async def refuse_without_tables(broker: SqlBroker) -> None:
    """Serve nothing that would fail at each request. Later the database may be away for a while.

    Raises:
        StoreError: the database cannot be reached, or refuses.
        SchemaError: its tables are missing, or are not those that this version needs.
    """
    try:
        problems = await broker._store.server.differences()  # noqa: SLF001 - the same package
    except StoreError as error:
        raise StoreError(
            f"nothing is served, as the database cannot be read: {error}. See whether its server "
            "runs, and whether the URL names its host, port, user and database"
        ) from None
    if problems and broker._validate_schema:  # noqa: SLF001 - as above
        raise SchemaError(
            f"nothing is served: {MISSING if are_missing(problems) else advice(problems)}"
        )


def tls_options(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """Uvicorn's options.

    Raises:
        SetupError: a file is missing, or only one of the two is given.
    """
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        missing = "key" if key is None else "certificate"
        raise SetupError(f"TLS needs both a certificate and its key: give {missing}, too")
    for path in (certificate, key):
        if not path.is_file():
            raise SetupError(f"{path} is no file")
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
