"""P9: a delay service of a front door, queues of 5 and 1 minutes and destinations runs from
one file, which is that of the docs."""

import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage, TestSqlBroker, VirtualClock
from faststream_sqlbroker.http import hash_password
from tests import forked
from tests.config.conftest import on_sqlite
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.running import COMMAND, STARTED, client_at, is_ready

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
Write = Callable[[str], Path]
ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "howto" / "configuration.md").read_text()
SERVE = ("-c", COMMAND, "serve", "--config")
START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def delays() -> str:
    """The file on the page."""
    found = re.search(r'```yaml title="delays.yaml"\n(.*?)```', PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@asynccontextmanager
async def serving(path: Path, log: Path, **env: str) -> AsyncIterator[str]:
    """The log of `sqlbroker serve --config`; it ends well on a signal."""
    log.write_bytes(b"")
    process = forked.python(*SERVE, str(path), said=log, env={**os.environ, **env})

    def handling() -> bool:
        assert process.poll() is None, log.read_text()
        return "handling" in log.read_text()

    try:
        await eventually(handling, timeout=STARTED)
        yield log.read_text()
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None)
        said = log.read_text()
        assert process.returncode == 0, said
        assert said.splitlines()[-1] == "stopped"
        assert "Traceback" not in said
    finally:
        process.kill()
        process.wait()


async def test_p9_five_and_one_minutes_by_a_clock_of_the_test(write: Write) -> None:
    """P1, P2, P9."""
    clock = VirtualClock(START)
    broker = SqlBroker.from_yaml(write(delays()), logger=None)
    got: list[tuple[str, str, float]] = []

    @broker.subscriber("orders", "mails")
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        # The clock of the test has milliseconds; what counts from a publish is rounded up.
        got.append((message.queue, body, int((clock.now - START).total_seconds())))

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("a", "front-door", destination="mails")
        await br.publish("b", "front-door", destination="orders", delay="8m")
        await br.publish(
            "c", "front-door", headers={"destination": "orders", "publish_after": "90s"}
        )
        await br.publish("d", "five-minutes", destination="mails")
        await br.publish("e", "one-minute")
        await clock.advance("4m59s")
        assert got == [("mails", "a", 0), ("orders", "e", 60), ("orders", "c", 90)]
        await clock.advance("1h")
        assert got[3:] == [("mails", "d", 300), ("orders", "b", 480)]


async def test_p9_the_service_runs_from_the_file(
    broker: SqlBroker, look: Look, database_url: str, write: Write, tmp_path: Path
) -> None:
    """P1, P2, P3, P9: in a process of its own, with short durations."""
    path = write(delays().replace("5m", "500ms").replace("1m\n", "100ms\n"))
    async with serving(path, tmp_path / "log", SQLBROKER_URL=database_url) as said:
        assert "handling 3 queues" in said
        ids = {
            await broker.publish(b"a", "front-door", destination="mails"): 0.0,
            await broker.publish(b"b", "front-door", destination="orders", delay="300ms"): 0.3,
            await broker.publish(b"c", "five-minutes", destination="orders"): 0.5,
            await broker.publish(b"d", "one-minute"): 0.1,
        }
        lost = await broker.publish(b"e", "front-door", headers={})
        refused = await broker.publish(b"f", "front-door", destination="elsewhere")

        async def arrived() -> list[dict[str, Any]] | None:
            rows = await look.rows()
            at_end = [row for row in rows if row["queue"] in {"orders", "mails"}]
            ended = await look.rows(archive=True)
            return at_end if len(at_end) == len(ids) and len(ended) == 2 else None

        rows = await eventually(arrived)
        assert rows is not None
        for row in rows:
            waited = row["next_attempt_at"] - row["created_at"]
            # By the database's clock; never earlier.
            assert waited >= timedelta(seconds=ids[row["id"]]), row
        assert {row["id"]: row["reason"] for row in await look.rows(archive=True)} == {
            lost: "no_destination",
            refused: "destination_not_allowed",
        }
        live = await broker.admin.subscribers()
        assert {queue for each in live for queue in each.queues} == {
            "front-door",
            "five-minutes",
            "one-minute",
        }


@on_sqlite
async def test_it_serves_http_if_the_file_says_so(
    broker: SqlBroker, database_url: str, write: Write, tmp_path: Path
) -> None:
    path = write(
        delays()
        + """
http:
  port: 0
  max_body: 1000
  users:
    - name: ann
      role: admin
      password_hash: ${ANN_HASH}
  channels:
    stop_timeout: 10m
    channels:
      shop:
        token: ${SHOP_TOKEN}
        consumers:
          billing: {type: pull, token: "${BILLING_TOKEN}"}
"""
    )
    env = {
        "SQLBROKER_URL": database_url,
        "ANN_HASH": hash_password("ann-password"),
        "SHOP_TOKEN": "a-token-of-the-shop",
        "BILLING_TOKEN": "a-token-of-billing",
    }
    tokens = {
        "X-Broker-Channel-Token": env["SHOP_TOKEN"],
        "X-Broker-Consumer-Token": env["BILLING_TOKEN"],
    }
    async with serving(path, tmp_path / "log", **env) as said:
        address = re.search(r"serving (http\S+)", said)
        assert address is not None
        async with client_at(address[1]) as client:
            await eventually(partial(is_ready, client))
            assert (await client.get("/csrf-token")).status_code == 401
            found = await client.get("/csrf-token", auth=("ann", "ann-password"))
            assert found.status_code == 200
            sent = await client.post("/channel/shop/broadcast", json={"id": 1}, headers=tokens)
            assert sent.status_code == 201, sent.text
            jobs = await client.get("/channel/shop/consumer/billing/queued-jobs", headers=tokens)
            [job] = jobs.json()["Result"]
            assert job["Message"]["Payload"] == '{"id":1}'


HTTP = """
http:
  port: 0
  proxy_auth: {header: X-User, proxies: [127.0.0.1], roles: {ann: admin}}
"""


@pytest.mark.parametrize("more", ["", HTTP], ids=["", "http"])
def test_without_tables_it_does_not_start(database_url: str, write: Write, more: str) -> None:
    done = refused(write(delays() + more), database_url)
    assert "error: cannot start: the broker's tables do not exist" in done.stderr
    assert "create them with `sqlbroker migrate`" in done.stderr


def test_without_its_database_it_does_not_start(write: Write) -> None:
    url = "postgresql+asyncpg://ann:s3cret@127.0.0.1:1/shop"
    done = refused(write(delays() + HTTP), url)
    assert "error: cannot start: the database cannot be read: " in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def refused(path: Path, url: str) -> CompletedProcess[str]:
    """What a service says that does not start."""
    done = forked.finished(*SERVE, str(path), env={**os.environ, "SQLBROKER_URL": url})
    assert done.returncode == 2, done.stdout
    assert "serving" not in done.stdout
    assert "Traceback" not in done.stderr
    return done
