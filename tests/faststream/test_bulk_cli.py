"""The command `sqlbroker`: dead letters, bulk actions, jobs and the audit."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.bulk import watch_job
from faststream_sqlbroker.exceptions import SetupError
from tests.faststream.conftest import QUICK, Look
from tests.faststream.test_admin_jobs import failed
from tests.faststream.test_operating_cli import Shell
from tests.helpers import eventually

pytestmark = pytest.mark.capability("the command `sqlbroker`: look, mend, check")


@pytest.fixture
def shell(broker: SqlBroker, database_url: str) -> Shell:
    return Shell(database_url)


async def test_an_incident_is_found_and_mended_from_a_shell(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("orders", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        raise (ConnectionError if body.isdigit() else ValueError)(f"no route for {body}")

    await broker.publish_batch("1", "2", "x", queue="orders")
    await broker.start()
    await failed(broker, 3)
    await broker.stop()
    text = await shell.run("dead")
    assert "ConnectionError: no route for" in text
    found = await shell.json("dead", "--queue", "orders", "--since", "1h")
    largest = found["groups"][0]
    assert (largest["count"], largest["queues"]) == (2, {"orders": 2})
    which = ("--fingerprint", largest["fingerprint"])
    text = await shell.run("redrive", *which, "--dry-run")
    assert "redrive: 2 messages" in text
    planned = await shell.json("redrive", *which, "--dry-run")
    assert (planned["state"], planned["expected"]) == ("planned", 2)
    text = await shell.run("redrive", *which, answer="n\n", code=1)
    assert "Continue?" in text
    assert await look.rows() == []
    text = await shell.run("redrive", *which, "--by", "Ann", answer="y\n")
    assert "ended, 2 of 2 done, 0 skipped" in text
    assert len(await look.rows()) == 2
    [entry] = await shell.json("audit")
    assert (entry["action"], entry["by"], entry["done"]) == ("redrive", "Ann", 2)
    assert entry["filters"] == {
        "archived": True,
        "state": "FAILED",
        "fingerprint": largest["fingerprint"],
    }
    text = await shell.run("audit")
    assert f"fingerprint={largest['fingerprint']}" in text
    assert entry["id"] in await shell.run("jobs")
    assert (await shell.json("jobs", "show", entry["id"]))["state"] == "ended"
    text = await shell.run("jobs", "undo", entry["id"], answer="y\n")
    assert "ended, 2 of 2 done, 0 skipped" in text
    assert await look.rows() == []
    # What is put back is archived anew.
    times = {"first_at": None, "last_at": None}
    back = [group | times for group in (await shell.json("dead"))["groups"]]
    assert back == [group | times for group in found["groups"]]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_canary_and_an_id_are_redriven_before_the_rest(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("orders", **QUICK, retry_strategy=None, max_workers=1)
    async def handle(_body: str) -> None:
        raise ValueError

    await broker.publish_batch(*range(4), queue="orders")
    await broker.start()
    await failed(broker, 4)
    await broker.stop()
    archived = await look.rows(archive=True)
    first, *_, last = sorted(archived, key=lambda row: (row["archived_at"], row["id"]))
    canary = await shell.json("redrive", "--limit", "1", "--yes")
    assert (canary["done"], canary["limit"]) == (1, 1)
    assert [row["id"] for row in await look.rows()] == [first["id"]]
    assert "redrive: 1 message (the oldest)" in await shell.run(
        "redrive", "--limit", "1", "--dry-run"
    )
    wanted = str(last["id"])
    text = await shell.run("retry", wanted, "--yes", code=1)
    assert f"it is in the archive as FAILED: `redrive {wanted}` returns it to its queue" in text
    text = await shell.run("redrive", wanted, str(first["id"]), "--yes", code=1)
    assert "redrive: 1 message\n" in text
    assert f"message {first['id']}: it is PENDING: `retry {first['id']}` makes it due" in text
    assert len(await look.rows()) == 2
    text = await shell.run("audit")
    assert "limit=1" in text
    assert f"ids=[{first['id']}, {wanted}]" in text
    assert "did you mean 'orders'?" in await shell.run("redrive", "--queue", "ordres", "--yes")


async def test_messages_that_match_are_cancelled_retried_and_moved(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    for n in range(3):
        await broker.publish(n, "q", key=f"k{n}", delay=600)
    assert "retry_now: 3 messages" in await shell.run("retry", "--queue", "q", "--dry-run")
    job = await shell.json("retry", "--all", "--yes")
    assert (job["action"], job["done"], job["state"]) == ("retry_now", 3, "ended")
    job = await shell.json("move", "--to", "mended", "--queue", "q", "--key", "k1", "--yes")
    assert (job["arguments"], job["done"]) == ({"to": "mended"}, 1)
    job = await shell.json("cancel", "--queue", "q", "--reason", "test", "--by", "Ann", "--yes")
    assert (job["done"], job["by"]) == (2, "Ann")
    rows = await look.rows(archive=True)
    assert {row["last_error"] for row in rows} == {"cancelled by Ann: test"}
    [left] = await look.rows()
    assert left["queue"] == "mended"
    assert "0 messages" in await shell.run("cancel", "--queue", "q", "--yes")


async def test_a_replay_is_left_to_others_and_a_job_is_stopped_and_resumed(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(_body: str) -> None:
        pass

    await broker.publish("x", "q")
    await broker.start()
    await look.archived()
    await broker.stop()
    job = await shell.json("replay", "fix", "--queue", "q", "--no-wait", "--yes")
    assert (job["state"], job["done"]) == ("running", 0)
    assert "stopped" in await shell.run("jobs", "stop", job["id"])
    job = await shell.json("jobs", "resume", job["id"])
    assert (job["state"], job["done"]) == ("ended", 1)
    [row] = await look.rows()
    assert row["headers"]["replay-job"] == "fix"


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (["cancel", "--yes"], "no messages selected"),
    "both": (["cancel", "1", "--queue", "q", "--yes"], "not both"),
    "all and ids": (["retry", "1", "--all", "--yes"], "not both"),
    "json": (["redrive", "--json"], "--json cannot ask for confirmation: add --yes"),
    "a rate for ids": (
        ["cancel", "1", "--rate", "5", "--yes"],
        "--rate, --limit and --no-wait need",
    ),
    "a limit for ids": (["retry", "1", "--limit", "5"], "they do not apply to message ids"),
    "no wait for ids": (["move", "1", "--to", "q", "--no-wait"], "--no-wait need filter options"),
    "json and ids": (["cancel", "1", "--json"], "--json cannot ask for confirmation: add --yes"),
    "a job": (["jobs", "show", "x"], "job 'x' does not exist"),
    "an undo": (["jobs", "undo", "x"], "job 'x' does not exist"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_commands_are_refused(shell: Shell, what: str) -> None:
    words, text = REFUSED[what]
    with pytest.raises(SetupError, match=text):
        raise (await shell.result(*words)).exception or AssertionError


@pytest.mark.parametrize("command", ["jobs", "audit"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_limit_of_nothing_is_wrong_usage(shell: Shell, command: str) -> None:
    assert "0 is not in the range" in await shell.run(command, "--limit", "0", code=2)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_dry_run_of_ids_changes_nothing(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    message_id = await broker.publish("x", "q", key="k", delay=600.0)
    words = ("cancel", str(message_id), "7", "--dry-run")
    assert "not found" in await shell.run(*words)
    assert await shell.json(*words) == [
        {"id": message_id, "state": "PENDING", "queue": "q", "key": "k"},
        {"id": "7", "state": None, "queue": None, "key": None},
    ]
    assert len(await look.rows()) == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"price": 12345678901234567890.123456789}', "application/json"),
        ("1e400", "application/json"),
        ("NaN", "text/plain"),
        ('{"a": Infinity}', "text/plain"),
        ("[" * 10_000, "text/plain"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_json_is_published_as_it_is_given(
    shell: Shell, look: Look, text: str, kind: str
) -> None:
    await shell.run("publish", "q", text)
    [row] = await look.rows()
    assert (row["payload"].decode(), row["headers"]["content-type"]) == (text, kind)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_interrupted_command_says_that_its_job_goes_on(
    broker: SqlBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(3):
        await broker.publish(n, "q", delay=600.0)
    begun = await broker.admin.bulk_retry(queue="q", rate=0.001, dry_run=False, wait=False)
    watching = asyncio.create_task(watch_job(broker, begun))

    async def has_begun() -> bool:
        job = await broker.admin.job(begun.id)
        return job is not None and job.done == 1

    await eventually(has_begun)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert f"sqlbroker jobs stop {begun.id}" in capsys.readouterr().err


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_the_database_refuses_makes_the_exit_code_1(
    shell: Shell, broker: SqlBroker
) -> None:
    await broker.publish("good", "q")
    bad = await broker.publish("bad", "q")
    refusing = (
        "CREATE TRIGGER {} BEFORE UPDATE ON message WHEN NEW.queue = '{}' AND NEW.id = {} "
        "BEGIN SELECT RAISE(ABORT, 'not here'); END"
    )
    async with broker.engine.begin() as connection:
        await connection.execute(text(refusing.format("moved", "other", bad)))
    said = await shell.run("move", "--queue", "q", "--to", "other", "--yes", code=1)
    assert "ended, 1 of 2 done, 0 skipped, 1 failed: " in said
    [job] = await shell.json("audit")
    assert (job["done"], job["failed"], job["failures"][0][0]) == (1, 1, bad)
    async with broker.engine.begin() as connection:
        await connection.execute(text(refusing.format("undone", "q", job["failures"][0][0] - 1)))
    said = await shell.run("jobs", "undo", job["id"], "--yes", code=1)
    assert "ended, 0 of 1 done, 0 skipped, 1 failed: " in said
