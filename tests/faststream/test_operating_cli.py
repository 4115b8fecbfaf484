"""The command `sqlbroker`: every command that looks or mends, with tables and with --json."""

import asyncio
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from faststream_sqlbroker import Debounce, Delay, SqlBroker, Throttle
from faststream_sqlbroker.cli import complete
from faststream_sqlbroker.cli import look as looks
from faststream_sqlbroker.cli.app import OPERATIONS, app
from faststream_sqlbroker.core.overview import Count
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.overviews import QueueOverviews
from faststream_sqlbroker.exceptions import AccessError, LockLostError, SetupError, StoreError
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually
from tests.quick_tables import TABLES

GROUPED_QUEUES = list(OPERATIONS["queues"].commands)
pytestmark = pytest.mark.capability("the command `sqlbroker`: look, mend, check")


class Shell:
    """Runs commands on the test's database, in a thread: a command has an event loop of its own."""

    def __init__(self, url: str) -> None:
        self._runner = CliRunner(env={"SQLBROKER_URL": url, "COLUMNS": "300", "TERM": "dumb"})

    async def run(self, *words: str, code: int = 0, answer: str = "") -> str:
        result = await self.result(*words, answer=answer)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    async def result(self, *words: str, answer: str = "") -> Result:
        return await asyncio.to_thread(self._runner.invoke, app, list(words), input=answer)

    async def json(self, *words: str, code: int = 0) -> Any:
        result = await self.result(*words, "--json")
        assert result.exit_code == code, (result.output, result.exception)
        return json.loads(result.stdout)


@pytest.fixture
def shell(broker: SqlBroker, database_url: str) -> Shell:
    return Shell(database_url)


async def test_what_there_is_is_shown(shell: Shell, broker: SqlBroker) -> None:
    message_id = await broker.publish(
        {"card": 4111}, "orders", key="k", headers={"tenant": "a"}, delay=600
    )
    await broker.publish("x", "misspelt")
    text = await shell.run("queues")
    assert "orders" in text
    assert "no live subscriber" in text
    found = {each["queue"]: each for each in await shell.json("queues")}
    assert found["orders"]["delayed"] == {"value": 1, "how": "exact"}
    assert found["orders"]["problem"] == "no live subscriber"
    [one] = await shell.json("queues", "misspelt")
    assert one["ready"]["value"] == 1
    assert str(message_id) in await shell.run("messages", "--queue", "orders")
    page = await shell.json("messages", "--header", "tenant=a")
    assert [m["id"] for m in page["messages"]] == [message_id]
    assert (page["after"], "body" in page["messages"][0]) == (None, False)
    assert page["messages"][0]["state"] == "PENDING"
    shown = await shell.json("messages", "--key", "k", "--bodies")
    assert shown["messages"][0]["body"] == {"card": 4111}
    text = await shell.run("show", str(message_id))
    assert "card" in text
    assert "published" in text
    assert "4111" not in await shell.run("show", str(message_id), "--no-body")
    detail = await shell.json("show", str(message_id))
    assert [event["text"] for event in detail["history"]] == ["published", "due"]
    assert detail["explanation"]["reasons"][0]["code"] == "delayed"
    explained = await shell.run("explain", str(message_id))
    assert explained.splitlines()[1].startswith("- delayed: it is not due before")
    assert "no_live_subscriber" in await shell.run("explain", str(message_id))
    assert (await shell.json("explain", str(message_id)))["state"] == "PENDING"
    await shell.run("explain", "999999", code=1)
    await shell.run("show", "999999", code=1)
    missing = await shell.result("show", "999999", "--json")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert json.loads(missing.stderr)["error"].startswith(
        "no live or archived message has the id 999999"
    )


async def test_a_failed_message_shows_its_reason_and_its_error(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        raise KeyError("vat_id")

    await broker.start()
    await broker.publish("x", "q")
    await look.archived()
    text = await shell.run("messages", "--archived", "--state", "FAILED")
    header, line = text.splitlines()[1:3]
    assert header.split()[-2:] == ["reason", "error"]
    assert "max_attempts" in line
    assert line.rstrip().endswith("KeyError: 'vat_id'")


async def test_an_operator_is_named_by_user_and_host(shell: Shell, broker: SqlBroker) -> None:
    await broker.publish("x", "q")
    await shell.run("pause", "q", "--yes")
    [action] = await shell.json("audit")
    assert action["by"] == f"{getpass.getuser()}@{socket.gethostname()}"


async def test_a_queue_without_messages_and_subscribers_is_told(
    shell: Shell, broker: SqlBroker
) -> None:
    await broker.publish("x", "orders")
    nothing = (
        "ordres: the queue has no waiting messages and no live subscribers; did you mean 'orders'?"
    )
    assert nothing in await shell.run("queues", "ordres")
    assert nothing in await shell.run("pause", "ordres", answer="n\n", code=1)
    assert "other: the queue has no waiting messages" in await shell.run("queues", "other")
    assert "no waiting messages" not in await shell.run("queues", "orders")
    assert await broker.admin.paused() == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_similar_queues_are_named_for_one_that_has_nothing(
    shell: Shell, broker: SqlBroker
) -> None:
    for queue in ("orders", "orders2"):
        await broker.publish("x", queue)
    nothing = "ordres: the queue has no waiting messages and no live subscribers; "
    nothing += "did you mean 'orders' or 'orders2'?"
    assert nothing in await shell.run("publish", "ordres", "x")
    mended = await shell.run("move", "--to", "orders", "--queue", "ordres", "--yes")
    assert "did you mean" not in mended
    for words in (["messages", "--queue"], ["dead", "--queue"], ["subscribers"], ["policies"]):
        assert nothing in await shell.run(*words, "ordres")
    assert nothing in await shell.run("move", "--to", "ordres", "--all", "--dry-run")
    assert nothing in await shell.run("redrive", "--to", "ordres", "--dry-run")
    assert nothing in await shell.run("cancel", "--queue", "ordres", "--yes")
    assert nothing in await shell.run("pause", "ordres", code=1)
    assert await broker.admin.paused() == []
    assert nothing in await shell.run("pause", "ordres", "--yes")
    was_not = await shell.run("resume", "ordre")
    assert "ordre was not paused; did you mean 'ordres'?" in was_not
    assert "'ordres'" not in await shell.run("queues", "ordre"), "it has a pause only"
    for words in ((), ("orders2",)):
        assert "'ordres'" not in await shell.run("queues", *words)
    paused = await shell.result("pause", "order", "--yes", "--json")
    assert "did you mean 'orders' or 'orders2'?" in paused.stderr
    assert json.loads(paused.stdout)["queue"] == "order"
    assert "did you mean 'sqlbroker queues policies'?" in await shell.run("queues", "policy")
    refused = await shell.run("queues", "policeis", "orders", code=2)
    assert "No such command 'policeis'. Did you mean 'policies'?" in " ".join(refused.split())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_hint_that_cannot_be_read_keeps_no_command_from_its_work(
    shell: Shell, broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> Any:
        raise StoreError("a read takes too long")

    async def take_too_long(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(looks, "HINT_TIMEOUT", 0.05)
    for read in (fail, take_too_long):
        monkeypatch.setattr(QueueOverviews, "read_overviews", read)
        assert "q is paused" in await shell.run("pause", "q", "--yes")
        await shell.run("publish", "q", "x")
        await shell.run("move", "--all", "--to", "other", "--yes")
        await shell.run("redrive", "--to", "other", "--yes")
        await shell.run("messages", "--queue", "q")
    refused = await shell.result("pause", "", "--yes")
    assert isinstance(refused.exception, SetupError)


async def test_an_error_does_not_hide_the_changes_before_it(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    """Each change is a transaction of its own, and the first error ends the command."""
    message_id = str(await broker.publish("x", "q"))
    other_id = str(await broker.publish("x", "q"))
    failed = await shell.result("cancel", message_id, "no id", other_id, "--yes", "--json")
    assert isinstance(failed.exception, SetupError)
    assert [(each["message_id"], each["done"]) for each in json.loads(failed.stdout)] == [
        (int(message_id), True)
    ]
    assert [str(row["id"]) for row in await look.rows()] == [other_id]
    nothing = await shell.result("cancel", "no id", "--yes", "--json")
    assert (isinstance(nothing.exception, SetupError), nothing.stdout) == (True, "")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_nothing_is_asked_about_what_is_not_there(shell: Shell, broker: SqlBroker) -> None:
    for words, code in (
        ("retry 999", 1),
        ("retry 998 999 --dry-run", 1),
        ("edit 999 --priority 5", 1),
        ("postpone 999 1h", 1),
        ("release-lock report", 0),
        ("forget-unknown 999", 0),
    ):
        said = await shell.run(*words.split(), answer="y\n", code=code)
        assert "Continue?" not in said
        assert re.search("999 +not found|had no holder|removed 0 messages", said), words
    assert await broker.admin.audit() == []


def test_a_completion_makes_no_file(tmp_path: Path) -> None:
    place = {"COMP_WORDS": "sqlbroker queues ", "COMP_CWORD": "2"}
    url = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    env = {"_SQLBROKER_COMPLETE": "complete_bash", "SQLBROKER_URL": url, **place}
    done = CliRunner(env=env).invoke(app, prog_name="sqlbroker")
    assert str(done.stdout).split() == GROUPED_QUEUES
    assert list(tmp_path.iterdir()) == []


async def test_text_that_is_nearly_json_is_published_with_a_warning(shell: Shell) -> None:
    assert "warning: the body looks like JSON" in await shell.run("publish", "q", '{"order": 17')
    for body in ('{"order": 17}', "plain", "[1]"):
        assert "warning" not in await shell.run("publish", "q", body)


async def test_a_table_for_a_program_has_whole_lines(
    shell: Shell, broker: SqlBroker, database_url: str
) -> None:
    """On a terminal no word is cut: columns are folded, or rows are shown one below the other."""
    name = "a queue with a name of many words, which a narrow terminal folds"
    await broker.admin.pause(name, by="ola", reason="they are many")
    for columns, is_folded in ((None, False), ("200", False), ("110", True), ("60", True)):
        env = {"SQLBROKER_URL": database_url, "COLUMNS": columns, "TERM": "dumb"}
        found = await asyncio.to_thread(CliRunner(env=env).invoke, app, ["audit"])
        assert (f"queue={name}"[:50] in found.output) is not is_folded
        assert max(map(len, found.output.splitlines())) <= int(columns or 999)
        assert {"ola", "ended", "queue=a", "name"} <= set(found.output.split())
        [line] = [each for each in found.output.splitlines() if "ola" in each]
        assert ("ended" in line) is (columns != "60")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_no_command_cuts_a_word_in_sixty_columns(
    shell: Shell, broker: SqlBroker, database_url: str
) -> None:
    queue = "customer-notifications.high"
    message_id = await broker.publish({"n": 1}, queue, key="customer-4711", delay=600)
    env = {"SQLBROKER_URL": database_url, "TERM": "dumb", "NO_COLOR": "1"}
    for words in (["queues"], ["messages"], ["show", str(message_id)], ["check"], ["top"]):
        command = [*words, "--count", "1"] if words == ["top"] else words
        wide, narrow = [
            await asyncio.to_thread(CliRunner(env=env | {"COLUMNS": columns}).invoke, app, command)
            for columns in ("300", "60")
        ]
        assert max(map(len, narrow.output.splitlines())) <= 60, narrow.output
        assert queue in narrow.output.split() or words == ["check"], narrow.output
        volatile = re.compile(r"[\d:.-]+|s,?|min|h")
        words_of = [
            {word for word in done.output.split() if not volatile.fullmatch(word)}
            for done in (wide, narrow)
        ]
        assert words_of[1] <= words_of[0], narrow.output


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_is_given_is_checked_before_the_question(
    shell: Shell, broker: SqlBroker
) -> None:
    message_id = str(await broker.publish("x", "q", delay=600))
    await broker.admin.pause("q")
    [action] = await broker.admin.audit()
    wrong = (
        (["pause", "q", "--until", "0s"], "until must be a datetime, or a duration above 0"),
        (["postpone", message_id, "soon"], "until"),
        (["move", message_id, "--to", ""], "queue"),
        (["edit", message_id, "--priority", "500"], "priority"),
        (["edit", message_id], "edit needs priority, key or due"),
        (["cancel", "abc"], "message_id must be a 64-bit integer"),
        (["retry", message_id, "1.5"], "message_id must be a 64-bit integer"),
        (["move", "--all", "--to", ""], "queue"),
        (["redrive", "--rate", "0"], "rate must be a number"),
        (["release", "web:7"], "no subscriber is named"),
        (["drain", "web:7"], "no live subscriber or process"),
        (["release-lock", ""], "cannot be the key of a lock"),
        (["forget-schedule", "none"], "schedule 'none' does not exist"),
        (["pause-schedule", "none"], "schedule 'none' does not exist"),
        (["jobs", "undo", action.id], "cannot undo "),
        (["partitions", "--convert"], "no archive with partitions: give --every"),
        (["prune", "--completed", "soon"], "completed"),
    )
    for words, said in wrong:
        done = await shell.result(*words, answer="y\n")
        assert said in done.output + str(done.exception), words
        assert "Continue?" not in done.output, words


async def test_names_are_completed(
    shell: Shell, broker: SqlBroker, database_url: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """By the URL or the application, which may print; those that a shell would run are not."""
    for queue in ("orders", "orders.dead", "mails", "orders $(reboot)", "-orders"):
        await broker.publish("x", queue)
    name = f"complete_{abs(hash(database_url))}"
    (tmp_path / f"{name}.py").write_text(
        "from faststream_sqlbroker import SqlBroker\n"
        f"print('hello')\nbroker = SqlBroker({database_url!r}, logger=None)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    async def completed(line: str, url: str | None = database_url) -> list[str]:
        words = f"sqlbroker {line}"
        place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        variables = {"_SQLBROKER_COMPLETE": "complete_bash", "SQLBROKER_URL": url, **place}
        runner = CliRunner(env=variables)
        done = await asyncio.to_thread(runner.invoke, app, prog_name="sqlbroker")
        assert (done.exit_code, done.stderr) == (0, "")
        return str(done.stdout).split()

    assert await completed("queues pause or") == ["orders", "orders.dead"]
    assert await completed("pause or") == ["orders", "orders.dead"]
    assert await completed("messages --queue m") == ["mails"]
    assert await completed("queues ") == [*GROUPED_QUEUES, "mails", "orders", "orders.dead"]
    assert await completed("messages --state F") == ["FAILED"]
    assert await completed(f"--app {name}:broker queues m", None) == ["mails"]
    assert "--state" in await completed("messages --st")
    assert "dead" not in await completed("d")


def test_a_completion_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the application of `--app` does not."""
    end = threading.Event()
    module: Any = ModuleType("endless_app")
    module.__getattr__ = lambda _name: end.wait()
    monkeypatch.setitem(sys.modules, "endless_app", module)
    monkeypatch.setattr(complete, "QUERY_TIMEOUT", 0.05)
    place = {"COMP_WORDS": "sqlbroker --app endless_app:app queues ", "COMP_CWORD": "4"}
    runner = CliRunner(env={"_SQLBROKER_COMPLETE": "complete_bash", **place})
    done = runner.invoke(app, prog_name="sqlbroker")
    assert str(done.stdout).split() == GROUPED_QUEUES
    end.set()


async def test_tables_that_are_missing_are_told_with_the_command_that_makes_them(
    shell: Shell, look: Look
) -> None:
    async with look.engine.begin() as connection:
        await connection.run_sync(look.tables.metadata.drop_all)
    refused = await shell.result("queues")
    assert isinstance(refused.exception, AccessError)
    assert "run `sqlbroker migrate`, or check that --schema" in str(refused.exception)
    assert "create_tables" not in str(refused.exception)


async def test_a_page_goes_on_where_the_command_said(shell: Shell) -> None:
    for command in ("messages", "verify"):
        refused = await shell.result(command, "--after", "nonsense")
        assert "--after must be the value that the previous command printed" in str(
            refused.exception
        )


async def test_a_database_that_is_away_is_told_with_what_to_do() -> None:
    for url in ("postgresql+asyncpg://shop@127.0.0.1:1/shop", "mysql+aiomysql://127.0.0.1:1/shop"):
        refused = await Shell(url).result("queues")
        assert "the database cannot be reached: " in str(refused.exception)
        assert "Check that its server runs" in str(refused.exception)


async def test_pages_go_on(shell: Shell, broker: SqlBroker) -> None:
    ids = [await broker.publish("x", "q") for _ in range(3)]
    assert "--after" in await shell.run("messages", "--limit", "2")
    first = await shell.json("messages", "--limit", "2")
    rest = await shell.json("messages", "--limit", "2", "--after", first["after"])
    assert [m["id"] for m in [*first["messages"], *rest["messages"]]] == ids[::-1]


async def test_a_message_is_mended_from_a_shell(
    shell: Shell, broker: SqlBroker, look: Look
) -> None:
    asked = ("--key", "k", "--delay", "10m", "--header", "destination=out", "--header", "n=a=b")
    published = await shell.json("publish", "q", '{"a": 1}', *asked)
    message_id = str(published["message_id"])
    [row] = await look.rows()
    assert load_headers(row["headers"]) == {
        "content-type": "application/json",
        "destination": "out",
        "n": "a=b",
    }
    refused = await shell.run("cancel", message_id, answer="n\n", code=1)
    assert "PENDING" in refused
    assert "cancel: 1 message\n" in refused
    assert len(await look.rows()) == 1
    moved = await shell.json("move", message_id, "--to", "other", "--yes")
    assert (moved[0]["verdict"], moved[0]["done"]) == ("done", True)
    [row] = await look.rows()
    assert (row["queue"], row["payload"], row["key"]) == ("other", b'{"a": 1}', "k")
    assert "done" in await shell.run("postpone", message_id, "1h", "--yes")
    assert "done" in await shell.run("retry", message_id, answer="y\n")
    assert await shell.json("cancel", message_id, "--by", "Ann", "--reason", "test", "--yes")
    [row] = await look.rows(archive=True)
    assert (row["reason"], row["last_error"]) == ("cancelled", "cancelled by Ann: test")
    text = await shell.run("cancel", message_id, "999999", "--yes", code=1)
    assert "it is in the archive" in text
    assert "no live or archived message has this id" in text
    with pytest.raises(SetupError, match="--json cannot ask for confirmation: add --yes"):
        raise (await shell.result("cancel", message_id, "--json")).exception or AssertionError


async def test_a_queue_is_paused_and_resumed(shell: Shell, broker: SqlBroker) -> None:
    await broker.publish("x", "q")
    assert "1 ready" in await shell.run("pause", "q", answer="n\n", code=1)
    assert await broker.admin.paused() == []
    paused = await shell.json("pause", "q", "--by", "Ann", "--until", "2h", "--yes")
    assert (paused["queue"], paused["by"]) == ("q", "Ann")
    assert "paused by Ann" in await shell.run("queues")
    assert "is paused until" in await shell.run("pause", "q", "--yes")
    assert await shell.json("resume", "q", "--by", "Bob") == {"queue": "q", "was_paused": True}
    assert "q was not paused" in await shell.run("resume", "q")
    done = [(job.action, job.by, dict(job.arguments)) for job in await broker.admin.audit()]
    until = {"until": 7200.0}
    assert done[0] == ("resume", "Bob", {"queue": "q"})
    assert done[1][::2] == ("pause", {"queue": "q"})
    assert done[2:] == [("pause", "Ann", {"queue": "q", **until})]


async def test_subscribers_are_listed(shell: Shell, broker: SqlBroker) -> None:
    @broker.subscriber("q", **QUICK, ordered=True, policies=[Delay("5s")])
    async def handle(_body: str) -> None: ...

    await broker.start()
    await eventually(broker.admin.subscribers)
    assert "ordered=True and Delay(5s)" in await shell.run("subscribers")
    [one] = await shell.json("subscribers", "q")
    assert one["queues"] == ["q"]
    assert one["policies"] == ["Delay(5s)"]
    assert "rules" not in one
    assert await shell.json("subscribers", "other") == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_waits_for_policies_is_shown_until_when(shell: Shell, broker: SqlBroker) -> None:
    @broker.subscriber("slow", **QUICK, policies=[Throttle(1, per="1h")])
    async def handle(_body: str) -> None: ...

    @broker.subscriber("kept", **QUICK, ordered=True)
    async def keep(_body: str) -> None: ...

    await broker.publish_batch(*range(3), queue="slow")
    await broker.start()

    async def wait_for_it() -> bool:
        listed = await broker.admin.policies("slow")
        return [wait.count for each in listed for wait in each.waits] == [2]

    await eventually(wait_for_it)
    _, _, kept, slow = (await shell.run("policies")).splitlines()
    assert kept.split() == ["kept", "ordered=True", "none", "wait", "0", "0"]
    assert slow.startswith("slow   Throttle(1, per=3600s)  throttled")
    assert slow.split()[4:6] == ["2", "2"]
    [found] = await shell.json("policies", "slow")
    [wait] = found["waits"]
    assert (wait["code"], wait["count"]) == ("throttled", 2)
    assert found["at"] < wait["until"] < wait["until_last"]
    text = await shell.run("policies", "--limit", "1")
    assert text.splitlines()[-1] == "there may be more queues: continue with --after kept"
    assert "there may be more" not in await shell.run("policies", "kept", "--limit", "1")
    assert "kept" not in await shell.run("policies", "--after", "kept")
    assert "no live subscriber of other has policies" in await shell.run("policies", "other")


async def test_a_message_is_edited(shell: Shell, broker: SqlBroker, look: Look) -> None:
    message_id = str(await broker.publish("x", "q", key="k", delay=600))
    assert "done" in await shell.run("edit", message_id, "--priority", "7", "--due", "2h", "--yes")
    [row] = await look.rows()
    assert (row["priority"], row["key"]) == (7, "k")
    await shell.json("edit", message_id, "--key", "other", "--yes")
    assert [row["key"] for row in await look.rows()] == ["other"]
    await shell.json("edit", message_id, "--no-key", "--yes")
    assert [row["key"] for row in await look.rows()] == [None]
    for words in (["--key", "a", "--no-key"], []):
        result = await shell.result("edit", message_id, *words, "--yes")
        assert isinstance(result.exception, SetupError)


async def test_what_a_worker_has_leased_is_released(shell: Shell, broker: SqlBroker) -> None:
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str) -> None:
        await end.wait()

    await broker.publish("x", "q")
    await broker.start()

    async def running() -> bool:
        [queue] = await broker.admin.queues("q")
        return queue.in_flight.value == 1 and queue.live_subscribers == 1

    await eventually(running)
    [live] = await broker.admin.subscribers("q")
    alive = await shell.result("release", live.worker, "--yes")
    assert "is alive until at least" in str(alive.exception)
    assert "or give --force, which lets other workers handle" in str(alive.exception)
    for change in ("release", "drain", "undrain"):
        unknown = await shell.result(
            change, "unknown:7", *(() if change == "undrain" else ("--yes",))
        )
        assert "`sqlbroker subscribers` lists the names" in str(unknown.exception)
        assert "admin." not in str(unknown.exception)
    await broker.admin.pause("q")
    await shell.run("release", live.worker, "--force", answer="n\n", code=1)
    released = await shell.json("release", live.worker, "--force", "--yes")
    assert released == {"worker": live.worker, "released": 1}
    end.set()


async def test_locks_and_schedules_and_unknown_outcomes_are_listed(
    shell: Shell, broker: SqlBroker
) -> None:
    async with broker.lock("report", lease="1h"):
        [lock] = await shell.json("locks")
        assert (lock["key"], lock["fence"]) == ("report", 1)
        assert "report" in await shell.run("locks")
    assert await shell.json("unknown", "q") == []
    assert await shell.json("schedules") == []
    assert "expression" in await shell.run("schedules")


async def test_a_lock_is_taken_from_its_holder_and_a_schedule_is_forgotten(
    shell: Shell, broker: SqlBroker
) -> None:
    broker.publish_on_schedule("nightly", "0 3 * * *", "q", "x")
    await broker.start()
    await eventually(broker.admin.schedules)
    await broker.stop()
    await shell.run("forget-schedule", "nightly", answer="n\n", code=1)
    text = await shell.run("forget-schedule", "nightly", "--by", "ola", answer="y\n")
    assert "nightly is forgotten" in text
    again = await shell.json("forget-schedule", "nightly", "--yes")
    assert again == {"name": "nightly", "was_known": False}
    assert "schedule nightly does not exist" in await shell.run(
        "forget-schedule", "nightly", "--yes"
    )
    with pytest.raises(LockLostError):
        async with broker.lock("report", lease="1h"):
            await shell.run("release-lock", "report", answer="n\n", code=1)
            done = await shell.json("release-lock", "report", "--yes", "--by", "ola")
            assert done == {"key": "report", "had_holder": True}
    assert "had no holder" in await shell.run("release-lock", "report", "--yes")
    assert await shell.json("forget-unknown", "1", "2", "--yes") == {"forgotten": 0}
    assert "0 messages" in await shell.run("forget-unknown", "1", "--yes")
    did = [(each["action"], each["by"]) for each in await shell.json("audit")]
    assert did == [("release_lock", "ola"), ("forget_schedule", "ola")]


async def test_a_schedule_is_run_paused_and_resumed(shell: Shell, broker: SqlBroker) -> None:
    broker.publish_on_schedule("nightly", "0 3 * * *", "q", "x")
    await broker.start()
    await eventually(broker.admin.schedules)
    await broker.stop()
    assert "requested a run of nightly" in await shell.run("run-schedule", "nightly", "--by", "ola")
    assert (await shell.json("schedules"))[0]["run_at"] is not None
    await shell.run("pause-schedule", "nightly", answer="n\n", code=1)
    text = await shell.run("pause-schedule", "nightly", "--by", "ola", answer="y\n")
    assert "nightly is paused until it is resumed" in text
    again = await shell.json("pause-schedule", "nightly", "--yes")
    assert again == {"name": "nightly", "paused": False}
    assert "nightly is already paused" in await shell.run("pause-schedule", "nightly", "--yes")
    for change in (("pause-schedule", "--yes"), ("resume-schedule",)):
        refused = await shell.result(*change, "nihgtly")
        assert isinstance(refused.exception, SetupError)
        assert "'nihgtly' does not exist: did you mean 'nightly'?" in str(refused.exception)
        refused = await shell.result(*change, "hourly")
        assert "schedule 'hourly' does not exist: see `sqlbroker schedules`" in str(
            refused.exception
        )
    assert "ola" in await shell.run("schedules")
    refused = await shell.result("run-schedule", "nightly")
    assert isinstance(refused.exception, SetupError)
    resumed = await shell.json("resume-schedule", "nightly", "--by", "ola")
    assert resumed == {"name": "nightly", "was_paused": True}
    assert "was not paused" in await shell.run("resume-schedule", "nightly")
    assert "schedule none does not exist" in await shell.run("run-schedule", "none", code=1)
    did = [(each["action"], each["by"]) for each in await shell.json("audit")]
    assert did == [("resume_schedule", "ola"), ("pause_schedule", "ola"), ("run_schedule", "ola")]


async def test_check_tells_what_is_wrong_by_its_exit_code(
    shell: Shell, broker: SqlBroker, engine: AsyncEngine
) -> None:
    assert "ok" in await shell.run("check")
    await broker.publish("x", "q")
    findings = await shell.json("check", code=1)
    assert {each["what"]: each["ok"] for each in findings} == {
        "database": True,
        "writes": True,
        "tables": True,
        "rights": True,
        "clock": True,
        "transactions": True,
        "dead rows": True,
        "queues": True,
        "queue q": False,
        "overdue schedule": True,
        "dead letters": True,
        "unknown outcomes": True,
    }
    assert "WRONG" in await shell.run("check", code=1)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("DROP TABLE message_archive")
    wrong = {each["what"]: each for each in await shell.json("check", code=1) if not each["ok"]}
    tables = wrong.pop("tables")
    assert wrong.keys() == {"rights"}, "the archive is missing there, too"
    assert "message_archive" in tables["text"]
    assert len(tables["text"]) > 60
    assert tables["text"] in " ".join((await shell.run("check", code=1)).split()), "not cut"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_check_passes_nothing_that_it_could_not_read(
    shell: Shell, broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """SQLite takes texts of another program that are none."""

    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        raise KeyError(body)

    await broker.start()
    await broker.publish("x", "q")
    await look.archived()
    async with engine.begin() as connection:
        await connection.exec_driver_sql(
            "UPDATE message_archive SET last_error = CAST(x'ff' AS TEXT)"
        )
    said = {each["what"]: each for each in await shell.json("check", code=1)}
    assert said["not read"]["text"].startswith("the dead letters could not be read: ")
    assert said.keys().isdisjoint({"dead letters", "overdue schedule", "unknown outcomes"})


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_list_that_may_lack_something_says_so(
    shell: Shell, broker: SqlBroker, engine: AsyncEngine
) -> None:
    """On stderr, so that programs can read the JSON."""
    hint = "there may be more than 1: raise --limit"
    await broker.create_tables()
    for queue in ("a", "b"):
        await broker.admin.pause(queue)
    async with broker.lock("a"), broker.lock("b"):
        for words in ("locks", "audit"):
            assert hint in await shell.run(words, "--limit", "1")
            listed = await shell.result(words, "--limit", "1", "--json")
            assert len(json.loads(listed.stdout)) == 1
            assert hint in listed.stderr
            assert "may be more" not in await shell.run(words, "--limit", "3")
    message = TABLES.message
    async with engine.begin() as connection:
        rows = [{"queue": f"q{n:03}", "payload": b"x"} for n in range(501)]
        await connection.execute(insert(message), rows)
    assert "there may be more than 500: name a queue" in await shell.run("queues")
    assert "may be more" not in await shell.run("queues", "q500")
    checked = {each["what"]: each["text"] for each in await shell.json("check", code=1)}
    assert checked["queues"] == "502 checked, not all", "the paused are always listed"


async def test_check_finds_what_stands_by_where_no_claim_looks(
    shell: Shell, broker: SqlBroker, engine: AsyncEngine
) -> None:
    @broker.subscriber("q", policies=[Debounce("1h")])
    async def handle(body: str) -> None: ...

    await broker.start()
    first = await broker.publish("one", "q", key="k")
    await broker.publish("two", "q", key="k")

    async def stands_by() -> bool:
        [found] = await broker.admin.queues("q")
        return found.standing == Count(1)

    await eventually(stands_by)
    [subscriber] = broker.subscribers
    subscriber.pause()
    message = TABLES.message
    # What stands by is to be looked at 7,000 years before it is due.
    planned = update(message).where(message.c.id == first)
    planned = planned.values(next_attempt_at=datetime(8970, 1, 2, tzinfo=timezone.utc))

    async def is_late() -> bool:
        async with engine.begin() as connection:
            await connection.execute(planned)
        [found] = await broker.admin.queues("q")
        return found.standing_overdue > 3600.0

    await eventually(is_late)
    assert "WRONG" not in await shell.run("check", "--max-age", "900000h")

    async def problems() -> list[str]:
        # The last claim, which may still run, would plan it anew.
        await is_late()
        result = await shell.result("check", "--json")
        rows = json.loads(result.output) if result.exit_code == 1 else []
        return [row["text"] for row in rows if row["what"] == "queue q" and not row["ok"]]

    [text] = await eventually(problems)
    assert text.startswith("1 standby messages have not been checked")


async def test_a_broker_is_found_by_its_module(
    shell: Shell, broker: SqlBroker, database_url: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The name of the module is the database's, so that no other test has imported it."""
    name = f"shop_{abs(hash(database_url))}"
    (tmp_path / f"{name}.py").write_text(
        "from dataclasses import replace\n"
        "from faststream import FastStream\n"
        "from faststream_sqlbroker import SqlBroker\n"
        f"broker = SqlBroker({database_url!r}, logger=None)\n"
        "app = FastStream(broker)\n"
        "def hide(message):\n    return replace(message, body='***')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    message_id = await broker.publish("secret", "q")
    for target in (f"{name}:broker", f"{name}:app"):
        words = ["--app", target, "show", str(message_id), "--redact", f"{name}:hide"]
        text = await shell.run(*words)
        assert "***" in text
        assert "secret" not in text
    for wrong, said in (
        (f"{name}:none", "cannot be imported"),
        (f"{name}:hide", "must name a SqlBroker"),
        (name, "must be module:name"),
    ):
        result = await shell.result("--app", wrong, "queues")
        assert said in str(result.exception)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://shop:hidden@127.0.0.1:1/shop",
        "mysql+aiomysql://shop:hidden@127.0.0.1:1/shop",
        "postgresql+psycopg2://shop:hidden@127.0.0.1:1/shop",
        "nonsense://shop:hidden@127.0.0.1:1/shop",
        "shop:hidden@nowhere",
    ],
)
async def test_a_password_is_never_shown(url: str) -> None:
    result = await Shell(url).result("queues")
    assert result.exit_code != 0
    assert "hidden" not in result.output
    assert "hidden" not in str(result.exception)


async def test_without_a_database_it_says_how_to_name_one() -> None:
    result = await asyncio.to_thread(CliRunner(env={"SQLBROKER_URL": None}).invoke, app, ["queues"])
    assert "use --app module:broker, --url with a SQLAlchemy URL" in str(result.exception)
    for command in (("messages",), ("publish", "q", "1")):
        result = await Shell("sqlite+aiosqlite:///none.db").result(*command, "--header", "x")
        assert "--header must be name=value" in str(result.exception)


def test_operators_need_no_spark(tmp_path: Path) -> None:
    """`sqlbroker[cli]` brings neither pyspark nor Alembic."""
    program = """
import os, sys
for name in ("pyspark", "py4j", "alembic", "pandas", "pyarrow"):
    sys.modules[name] = None
from faststream_sqlbroker.cli import main
for command in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.argv[1:] = command.split()
        sys.exit(main())
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    url = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    environment = {**os.environ, "SQLBROKER_URL": url}
    # There are no tables, so the check finds something wrong.
    ends = {"--help": 0, "archive --help": 0, "spark --help": 0, "check": 1}
    words = [sys.executable, "-c", program, *ends]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "is not installed" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code ")]
    assert codes == [f"exit code {code}" for code in ends.values()], done.stderr


def _no_json(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_no_body_of_another_program_hides_the_others(
    shell: Shell, broker: SqlBroker, engine: AsyncEngine
) -> None:
    deep = "[" * 900 + "]" * 900
    bodies = ['{"n": NaN}', "-Infinity", deep, r'"\ud800"', '"last"']
    for body in bodies:
        await broker.publish(body.encode(), "q", headers={"content-type": "application/json"})
    async with engine.begin() as connection:
        await connection.execute(
            text("INSERT INTO message (queue, payload) VALUES (x'ff00', x'00')")
        )
    printed = await shell.run("messages", "--queue", "q", "--bodies", "--json")
    found = json.loads(printed, parse_constant=_no_json)["messages"]
    first, second, nested, _, last = [message["body"] for message in found]
    assert (first, second, last) == ({"n": "NaN"}, "-Infinity", "last")
    assert json.dumps(nested).count("[") == 97
    assert "last" in await shell.run("messages", "--bodies")
    assert [each["queue"] for each in await shell.json("queues")] == ["q"]
