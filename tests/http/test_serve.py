"""sqlbroker serve: a process of its own, with users or for this machine only."""

import asyncio
import os
import re
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.exceptions import SchemaError, SetupError, StoreError
from faststream_sqlbroker.http.basic_auth import hash_password, parse_password_hash
from faststream_sqlbroker.http.server import bind_socket
from tests import forked
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.conftest import on_sqlite
from tests.http.running import COMMAND, client_at, is_ready, running
from tests.proxy import proxied

pytestmark = pytest.mark.capability("`sqlbroker serve`")
PATH = "/v1/queues/shop/orders"
BATCH = 100
"""Messages of a request."""


@asynccontextmanager
async def serving(url: str, log: Path, *options: str) -> AsyncIterator[str]:
    """The address of a running server; it must end by itself on a signal."""
    command = ("-c", COMMAND, "serve", "--port", "0", *options)
    async with running(log, *command, SQLBROKER_URL=url) as address:
        yield address


async def test_it_serves_users_of_a_file(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    users.write_text(f"# our users\n\nann admin {hash_password('ann-password')}\n")
    async with (
        serving(database_url, tmp_path / "log", "--users", str(users)) as address,
        client_at(address) as client,
    ):
        await eventually(partial(is_ready, client))
        assert (await client.get("/csrf-token")).status_code == 401
        found = await client.get("/csrf-token", auth=("ann", "ann-password"))
        assert found.status_code == 200
        assert "server" not in found.headers


@on_sqlite
async def test_the_log_tells_what_an_answer_does_not(
    broker: SqlBroker, look: Look, database_url: str, tmp_path: Path
) -> None:
    """Here the tables are dropped while it serves."""
    log = tmp_path / "log"
    async with (
        serving(database_url, log, "--insecure", "--channels") as address,
        client_at(address) as client,
    ):
        async with look.engine.begin() as connection:
            await connection.run_sync(look.tables.metadata.drop_all)
        refused = await client.put("/channel/orders")
        assert refused.json() == {"error": "the database refused the request: see the server's log"}
        assert (
            "HTTP: PUT /channel/orders failed: OperationalError: no such table" in log.read_text()
        )
        assert "run the migrations" in log.read_text()


def test_without_tables_it_names_the_command_that_makes_them(database_url: str) -> None:
    """The command, run as it says, makes them: then it starts, and finds its port taken."""
    made = CliRunner(env={"SQLBROKER_URL": database_url})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serve = ["serve", "--insecure", "--port", str(taken.getsockname()[1])]
        refused = made.invoke(app, serve)
        assert isinstance(refused.exception, SchemaError)
        assert "cannot start: the broker's tables do not exist" in str(refused.exception)
        [command] = re.findall(r"`sqlbroker (\w+)`", str(refused.exception))
        done = made.invoke(app, [command, "--yes"])
        assert done.exit_code == 0, done.output
        again = made.invoke(app, serve)
        assert isinstance(again.exception, SetupError)
        assert "cannot listen" in str(again.exception)
    assert "serving" not in refused.output + again.output


async def test_other_tables_are_told_as_the_broker_tells_them(
    broker: SqlBroker, look: Look, database_url: str
) -> None:
    async with look.engine.begin() as connection:
        await connection.run_sync(look.tables.archive.drop)
    serve = ["serve", "--insecure", "--port", "0"]
    made = CliRunner(env={"SQLBROKER_URL": database_url})
    refused = await asyncio.to_thread(made.invoke, app, serve)
    assert isinstance(refused.exception, SchemaError)
    assert "`sqlbroker migrate`" in str(refused.exception)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://ann:s3cret@127.0.0.1:1/shop",
        "mysql+aiomysql://ann:s3cret@127.0.0.1:1/shop",
        "sqlite+aiosqlite:////nowhere/at/all.db",
    ],
)
def test_without_its_database_it_does_not_start(url: str) -> None:
    serve = ["serve", "--insecure", "--port", "0"]
    refused = CliRunner(env={"SQLBROKER_URL": url}).invoke(app, serve)
    assert isinstance(refused.exception, StoreError)
    said = str(refused.exception)
    assert said.startswith("cannot start: the database cannot be read: ")
    assert "Check that its server runs and that the URL has the right host" in said
    assert "s3cret" not in said
    assert "serving" not in refused.output


async def test_it_goes_on_after_an_outage_of_the_database(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    if broker.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no server")
    async with (
        proxied(database_url) as (proxy, url),
        serving(
            url.render_as_string(hide_password=False), tmp_path / "log", "--insecure"
        ) as address,
        client_at(address) as client,
    ):

        async def status(path: str) -> int:
            return (await client.get(path)).status_code

        async def answers() -> bool:
            return await is_ready(client) and await status("/v1/count") == 200

        await eventually(answers)
        await proxy.stop()
        assert await status("/v1/count") == 503
        assert await status("/health/live") == 200
        await proxy.start()
        await eventually(answers)


@on_sqlite
async def test_without_authentication_only_this_machine_is_served(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    """DNS rebinding, proxies."""
    async with (
        serving(database_url, tmp_path / "log", "--insecure") as address,
        client_at(address) as client,
    ):
        port = address.rpartition(":")[2]
        for path in ("/csrf-token", "/health/live"):
            assert (await client.get(path)).status_code == 200
            for good in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", f"[::1]:{port}"):
                assert (await client.get(path, headers={"Host": good})).status_code == 200
            for bad in ("evil.test", f"evil.test:{port}", "127.0.0.1.evil.test", "localhost.evil"):
                refused = await client.get(path, headers={"Host": bad})
                assert refused.status_code == 403
                assert refused.headers["x-content-type-options"] == "nosniff"
            for name in ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "Via", "X-Real-IP"):
                assert (await client.get(path, headers={name: "x"})).status_code == 403


@on_sqlite
async def test_a_slow_client_holds_up_no_other(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    async with (
        serving(database_url, tmp_path / "log", "--insecure") as address,
        client_at(address) as client,
    ):
        port = int(address.rpartition(":")[2])
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            writers.append(writer)
        assert (await client.get("/health/live")).status_code == 200
        for writer in writers:
            writer.close()


@on_sqlite
async def test_another_address_of_loopback_is_this_machines(
    broker: SqlBroker, database_url: str, tmp_path: Path
) -> None:
    options = ("--insecure", "--host", "127.0.0.2")
    async with (
        serving(database_url, tmp_path / "log", *options) as address,
        client_at(address) as client,
    ):
        assert address.startswith("http://127.0.0.2:")
        assert (await client.get("/csrf-token")).status_code == 200
        refused = await client.get("/csrf-token", headers={"Host": "192.0.2.1"})
        assert refused.status_code == 403


@on_sqlite
async def test_it_serves_tls(broker: SqlBroker, database_url: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {subject}".split()
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *files], check=True, capture_output=True)
    options = ("--insecure", "--certificate", str(certificate), "--key", str(key))
    trusted = ssl.create_default_context(cafile=str(certificate))
    async with (
        serving(database_url, tmp_path / "log", *options) as address,
        client_at(address, verify=trusted) as client,
        client_at(address) as stranger,
    ):
        assert address.startswith("https://")
        await eventually(partial(is_ready, client))
        with pytest.raises(httpx.ConnectError):
            await stranger.get("/health/ready")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "serve needs authentication"),
        (("--insecure", "--users", "users"), "serve needs authentication"),
        (("--insecure", "--host", "0.0.0.0"), "--insecure listens on this machine only"),
        (("--insecure", "--proxies", "10.0.0.300"), "is not an address or network"),
        (("--insecure", "--host", "example.org"), "--insecure listens on this machine only"),
        (("--users", "none"), "cannot be read"),
        (("--users", "bad"), "bad, line 2: must be a name, a role and a hash, got 2 words"),
        (
            ("--users", "worse"),
            "worse, line 1: a role must be viewer, operator or admin, got 'root'",
        ),
        (("--users", "empty"), "at least one Login"),
        (("--auth", "nonsense"), "must be module:name"),
        (("--auth", "os:sep"), "HTTP needs authentication"),
        (
            ("--insecure", "--certificate", "cert.pem"),
            "TLS needs both a certificate and its key: add the key",
        ),
        (("--insecure", "--key", "key.pem"), "its key: add the certificate"),
        (("--insecure", "--certificate", "cert.pem", "--key", "key.pem"), "cert.pem is not a file"),
    ],
)
def test_it_refuses_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good = hash_password("long enough")
    (tmp_path / "users").write_text(f"ann admin {good}\n")
    (tmp_path / "bad").write_text(f"ann admin {good}\nvic viewer\n")
    (tmp_path / "worse").write_text(f"ann root {good}\n")
    (tmp_path / "empty").write_text("# none\n")
    env = {"SQLBROKER_URL": "sqlite+aiosqlite:///shop.db"}
    result = CliRunner(env=env).invoke(app, ["serve", *options])
    assert result.exit_code != 0
    assert told in str(result.exception)


def test_a_port_is_below_65536() -> None:
    refused = CliRunner().invoke(app, ["serve", "--insecure", "--port", "80800"])
    assert refused.exit_code == 2
    assert "0<=x<=65535" in refused.output


@on_sqlite
def test_a_host_of_another_machine_is_told_as_that(database_url: str, tmp_path: Path) -> None:
    made = CliRunner(env={"SQLBROKER_URL": database_url})
    assert made.invoke(app, ["migrate", "--yes"]).exit_code == 0
    (users := tmp_path / "users").write_text(f"ann admin {hash_password('long enough')}\n")
    refused = made.invoke(app, ["serve", "--users", str(users), "--host", "192.0.2.1"])
    assert isinstance(refused.exception, SetupError)
    assert "use an address of this machine" in str(refused.exception)


@on_sqlite
def test_files_that_are_no_certificate_are_refused(database_url: str, tmp_path: Path) -> None:
    made = CliRunner(env={"SQLBROKER_URL": database_url})
    assert made.invoke(app, ["migrate", "--yes"]).exit_code == 0
    (file := tmp_path / "cert.pem").write_text("no certificate")
    files = ["--certificate", str(file), "--key", str(file)]
    refused = made.invoke(app, ["serve", "--insecure", "--port", "0", *files])
    assert isinstance(refused.exception, SetupError)
    assert f"TLS cannot use the certificate {file} with the key {file}: " in str(refused.exception)
    assert "Give a matching pair in PEM format" in str(refused.exception)


async def test_answers_are_not_held_back_for_more() -> None:
    """Nagle's algorithm and a client's late acknowledgements cost 40 ms an answer."""
    listener = bind_socket("port", "127.0.0.1", 0)
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def look(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_side = writer.get_extra_info("socket")
        accepted.set_result(server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(look, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 60)
        writer.close()


def test_a_password_is_asked_for_twice() -> None:
    asked = CliRunner().invoke(app, ["hash-password"], input="long enough\nlong enough\n")
    assert asked.exit_code == 0, asked.output
    assert parse_password_hash(asked.output.splitlines()[-1]).matches("long enough")
    short = CliRunner().invoke(app, ["hash-password"], input="short\nshort\n")
    assert "8 characters" in str(short.exception)


def test_a_script_gets_the_hash_alone() -> None:
    """Prompts go to stderr."""
    command = [sys.executable, "-W", "ignore", "-c", COMMAND, "hash-password"]
    given = "long enough\nlong enough\n"
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert "Password" in done.stderr
    [line] = done.stdout.splitlines()
    assert parse_password_hash(line).matches("long enough")


@on_sqlite
async def test_a_signal_that_answers_the_address_stops_it(
    broker: SqlBroker, database_url: str
) -> None:
    """Who waits for the address may want the end at once."""
    code = (
        "import os, signal\n"
        "from faststream_sqlbroker.cli import serve\n"
        "serve.print_address = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    command = ("-c", code + COMMAND, "serve", "--insecure", "--port", "0")
    env = {**os.environ, "SQLBROKER_URL": database_url}
    done = await asyncio.to_thread(forked.finished, *command, env=env)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


async def test_a_signal_leaves_no_batch_half_written(
    broker: SqlBroker, look: Look, database_url: str, tmp_path: Path
) -> None:
    """A batch that is under way is written or rolled back; one that was answered is there."""
    users = tmp_path / "users"
    users.write_text(f"ann admin {hash_password('ann-password')}\n")
    sent: list[str] = []
    answered: list[str] = []

    async def publish(client: httpx.AsyncClient, token: str, name: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        # Until the server has gone.
        with suppress(httpx.TransportError):
            while True:
                key = f"{name}-{len(sent)}"
                sent.append(key)
                batch = {"messages": [{"body": n, "key": key} for n in range(BATCH)]}
                found = await client.post(f"{PATH}/publish-batch", json=batch, headers=headers)
                if found.status_code != 201:
                    # The server stops, and its broker may be closed before its last answer.
                    assert found.status_code in {500, 503}, found.text
                    return
                answered.append(key)

    options = ("--users", str(users), "--queues")
    async with client_at("") as client:
        async with serving(database_url, tmp_path / "log", *options) as address:
            client.base_url = httpx.URL(address)
            made = await client.put(f"{PATH}/tokens/publish", auth=("ann", "ann-password"))
            token = made.json()["token"]
            tasks = [asyncio.create_task(publish(client, token, f"p{n}")) for n in range(4)]
            await eventually(lambda: len(answered) >= len(tasks))
        await asyncio.gather(*tasks)
    counts = Counter(row["key"] for row in await look.rows())
    assert set(counts.values()) == {BATCH}
    assert set(answered) <= set(counts) <= set(sent)
