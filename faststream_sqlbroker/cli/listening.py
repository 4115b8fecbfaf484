"""The server of `sqlbroker serve`: its address, limits, TLS and preconditions."""

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.output import print_line
from faststream_sqlbroker.exceptions import SchemaError, SetupError, StoreError
from faststream_sqlbroker.schema.validate import are_missing, format_advice

if TYPE_CHECKING:
    import uvicorn

IDLE_TIMEOUT = 5
"""Seconds for which uvicorn keeps an idle connection."""
MAX_CONNECTIONS = 500
"""Concurrent connections; further requests are refused with 503."""
SHUTDOWN_TIMEOUT = 5
"""Seconds for which a stop waits for responses in progress."""
MISSING_TABLES = (
    "the broker's tables do not exist in this database: create them with `sqlbroker migrate`, "
    "the same URL and table names (it needs the extra 'migrations'), or with your own Alembic"
)


def create_server_config(
    app: Any, host: str, port: int, tls: dict[str, Any]
) -> "tuple[uvicorn.Config, socket.socket]":
    """Create uvicorn's configuration and a listening socket.

    The socket is bound here, so that a port in use is an error before the server starts.

    Raises:
        SetupError: the port cannot be used, or the certificate or its key cannot be used.
    """
    import uvicorn  # noqa: PLC0415 - an extra

    from faststream_sqlbroker.http.server import LimitedProtocol, bind_socket  # noqa: PLC0415 - as above

    # The peer's address must be real, because it decides whether a header is trusted.
    config = uvicorn.Config(
        app,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        # Never another installed parser, which would not limit the head.
        http=LimitedProtocol,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_TIMEOUT,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        **tls,
    )
    try:
        config.load()
    except ssl.SSLError as error:
        raise SetupError(
            f"TLS cannot use the certificate {config.ssl_certfile} with the key "
            f"{config.ssl_keyfile}: {error.reason or error}. Give a matching pair in PEM format"
        ) from None
    return config, bind_socket("port", host, port)


def print_address(host: str, listener: socket.socket, tls: dict[str, Any]) -> None:
    """Print the address of the server, and a warning if passwords could be read on the network.

    With port 0 the system has chosen a free port, so the port is that of the bound socket.
    """
    from faststream_sqlbroker.http.local import is_loopback  # noqa: PLC0415 - an extra

    kind = "https" if tls else "http"
    display_host = f"[{host}]" if ":" in host else host
    print_line(f"serving {kind}://{display_host}:{listener.getsockname()[1]}")
    if not tls and not is_loopback(host):
        print_line("warning: without TLS, passwords are sent unencrypted: give a certificate")


async def check_tables(broker: SqlBroker) -> None:
    """Check the tables once at the start, because without tables each request would fail.

    The database may become unreachable later.

    Raises:
        StoreError: the database cannot be reached, or refuses.
        SchemaError: its tables are missing, or do not fit this version.
    """
    try:
        differences = await broker._store.server.find_differences()  # noqa: SLF001 - the same package
    except StoreError as error:
        raise StoreError(
            f"cannot start: the database cannot be read: {error}. Check that its server runs and "
            "that the URL has the right host, port, user and database"
        ) from None
    if differences and broker._validate_schema:  # noqa: SLF001 - as above
        reason = MISSING_TABLES if are_missing(differences) else format_advice(differences)
        raise SchemaError(f"cannot start: {reason}")


def build_tls_options(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """Return uvicorn's options for TLS; none without a certificate.

    Raises:
        SetupError: a file is missing, or only one of the two is given.
    """
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        missing = "key" if key is None else "certificate"
        raise SetupError(f"TLS needs both a certificate and its key: add the {missing}")
    for path in (certificate, key):
        if not path.is_file():
            raise SetupError(f"{path} is not a file")
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
