"""What docs/howto/security.md says of TLS, with servers and certificates made by the test."""

import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faststream.security import SASLPlaintext
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.broker.engine_factory import make_listen_engine
from tests.docs.test_security import PAGE
from tools.private import CannotStartError, folder_of, mariadb, postgresql

ROWS = dict(re.findall(r"^\| (\w+) \| `connect_args=(.+)` \|$", PAGE, re.MULTILINE))
[CERTIFICATES] = re.findall(r"```sh\n(.*?openssl.*?)```", PAGE, re.DOTALL)
DRIVERS = {
    "asyncpg": "postgresql+asyncpg",
    "psycopg": "postgresql+psycopg",
    "aiomysql": "mariadb+aiomysql",
    "asyncmy": "mariadb+asyncmy",
}
ENCRYPTED = {
    "postgresql": "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()",
    "mariadb": (
        "SELECT variable_value <> '' FROM information_schema.session_status "
        "WHERE variable_name = 'Ssl_cipher'"
    ),
}
"""Whether the connection is encrypted, as the server says."""


def make_certificates(folder: Path, host: str) -> None:
    """Write ca.pem, and server.pem with server.key for `host`, by the page's commands."""
    script = CERTIFICATES.replace("db.example", host)
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True, capture_output=True)
    for file in ("ca.pem", "server.pem", "server.key"):
        path = folder / file
        path.chmod(0o600 if file == "server.key" else 0o644)
        shutil.chown(path, folder.owner())


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Path]]:
    """The kind of a server with a certificate for localhost, its URL, and a folder with its CA's
    and another's."""
    kind = request.param
    known = tmp_path_factory.mktemp("ca")
    try:
        with ExitStack() as stack:
            folder, _ = stack.enter_context(
                folder_of("postgres" if kind == "postgresql" else "mysql")
            )
            make_certificates(folder, "localhost")
            shutil.copy(folder / "ca.pem", known / "ca.pem")
            files = {"cert": folder / "server.pem", "key": folder / "server.key"}
            if kind == "postgresql":
                settings = {f"ssl_{name}_file": str(path) for name, path in files.items()}
                url, _ = stack.enter_context(postgresql(ssl="on", **settings))
            else:
                url, _ = stack.enter_context(
                    mariadb(*(f"--ssl-{name}={path}" for name, path in files.items()))
                )
            yield kind, url.replace("127.0.0.1", "localhost"), known
    except CannotStartError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


def arguments(driver: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page says for `driver`, with the CA in `folder`."""
    monkeypatch.chdir(folder)
    found: dict[str, Any] = eval(ROWS[driver], {"ssl": ssl})
    return found


async def refused(engine: AsyncEngine) -> None:
    """No connection is made, and the certificate is why."""
    with pytest.raises(
        DBAPIError if engine.dialect.driver != "asyncpg" else ssl.SSLError
    ) as caught:
        await engine.connect()
    said = ""
    error = caught.value
    while error is not None:
        said, error = f"{said}\n{error}", error.__cause__ or error.__context__  # type: ignore[assignment]
    assert "certificate" in said, said


def test_every_driver_has_a_row() -> None:
    assert ROWS.keys() == DRIVERS.keys()


@pytest.mark.parametrize(
    ("served", "driver"),
    [(make_url(f"{name}://").get_backend_name(), driver) for driver, name in DRIVERS.items()],
    indirect=["served"],
)
async def test_a_certificate_is_checked(
    served: tuple[str, str, Path], driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server, known = served
    url = make_url(server).set(drivername=DRIVERS[driver])
    trusting = create_async_engine(url, connect_args=arguments(driver, known, monkeypatch))
    async with trusting.connect() as connection:
        assert await connection.scalar(text(ENCRYPTED[kind]))
    broker = SqlBroker(trusting, logger=None)
    await broker.create_tables()
    await broker.start()
    assert await broker.publish("x", "q")
    await broker.stop()
    await trusting.dispose()
    make_certificates(tmp_path, "localhost")
    for address, folder in ((url, tmp_path), (url.set(host="127.0.0.1"), known)):
        doubting = create_async_engine(address, connect_args=arguments(driver, folder, monkeypatch))
        await refused(doubting)
        await doubting.dispose()


@pytest.mark.parametrize("served", ["postgresql"], indirect=True)
async def test_a_url_of_asyncpg(
    served: tuple[str, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, server, known = served
    assert "?ssl=verify-full" in PAGE
    url = make_url(server).set(drivername="postgresql+asyncpg", query={"ssl": "verify-full"})
    monkeypatch.setenv("PGSSLROOTCERT", str(known / "ca.pem"))
    engine = make_listen_engine(url)
    assert engine is not None
    async with engine.connect() as connection:
        assert await connection.scalar(text(ENCRYPTED[kind]))
    await engine.dispose()
    await refused(create_async_engine(url.set(host="127.0.0.1")))


@pytest.mark.parametrize("served", ["postgresql"], indirect=True)
async def test_a_url_of_psycopg(served: tuple[str, str, Path]) -> None:
    kind, server, known = served
    query = {"sslmode": "verify-full", "sslrootcert": str(known / "ca.pem")}
    engine = create_async_engine(make_url(server).set(drivername="postgresql+psycopg", query=query))
    async with engine.connect() as connection:
        assert await connection.scalar(text(ENCRYPTED[kind]))
    await engine.dispose()


@pytest.mark.parametrize(
    ("served", "driver"),
    [
        (make_url(f"{DRIVERS[name]}://").get_backend_name(), name)
        for name in ("asyncpg", "aiomysql", "asyncmy")
    ],
    indirect=["served"],
)
async def test_security_of_the_broker(
    served: tuple[str, str, Path], driver: str, tmp_path: Path
) -> None:
    """Its login and its TLS reach the server; a certificate of another CA is refused."""
    kind, server, known = served
    address = make_url(server)
    url = address.set(drivername=DRIVERS[driver])._replace(username=None, password=None)
    make_certificates(tmp_path, "localhost")
    for folder in (known, tmp_path):
        security = SASLPlaintext(
            address.username or "",
            address.password or "",
            ssl_context=ssl.create_default_context(cafile=str(folder / "ca.pem")),
        )
        broker = SqlBroker(url, security=security, logger=None)
        if folder is known:
            async with broker.engine.connect() as connection:
                assert await connection.scalar(text(ENCRYPTED[kind]))
        else:
            await refused(broker.engine)
        await broker.stop()
