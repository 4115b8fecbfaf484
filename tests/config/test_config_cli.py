"""sqlbroker config check and schema; serve takes a file and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.config import json_schema
from faststream_sqlbroker.exceptions import ConfigError, SetupError
from tests.config.conftest import SERVICE

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
Write = Callable[[str], Path]
BAD = (
    f"{SERVICE}queues:\n  a: {{forward_to: b}}\n  c: {{forward_to: a, policies: [{{delay: -1}}]}}\n"
)


def test_a_file_without_mistakes(write: Write) -> None:
    path = write(SERVICE)
    done = CliRunner().invoke(app, ["config", "check", str(path)])
    assert (done.exit_code, done.output) == (0, f"{path}: no mistakes\n")
    done = CliRunner().invoke(app, ["config", "check", str(path), "--json"])
    assert (done.exit_code, json.loads(done.output)) == (0, [])


def test_each_mistake_has_a_line(write: Write) -> None:
    path = write(BAD)
    done = CliRunner().invoke(app, ["config", "check", str(path)])
    assert done.exit_code == 1
    [said] = done.output.splitlines()
    assert said.startswith(f"{path}:5:41: queues.c.policies[0].delay: Delay must be longer")


def test_programs_get_json(write: Write) -> None:
    done = CliRunner().invoke(app, ["config", "check", str(write(BAD)), "--json"])
    assert done.exit_code == 1
    [found] = json.loads(done.output)
    assert (found["line"], found["column"]) == (5, 41)
    assert found["where"] == "queues.c.policies[0].delay"
    assert found["text"].startswith("Delay must be longer")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """`main` makes one line and exit code 2 of this error."""
    done = CliRunner().invoke(app, ["config", "check", str(tmp_path / "none.yaml")])
    assert isinstance(done.exception, SetupError)
    assert not isinstance(done.exception, ConfigError)


def test_the_schema_is_printed() -> None:
    done = CliRunner().invoke(app, ["config", "schema"])
    assert (done.exit_code, json.loads(done.output)) == (0, json_schema())


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ((), ("--port", "0"), "--port"),
        ((), ("--insecure",), "--insecure"),
        ((), ("--users", "x"), "--users"),
        (("--url", "sqlite+aiosqlite:///x.db"), (), "--url"),
        (("--app", "x:y"), (), "--app"),
    ],
)
def test_serve_takes_a_file_and_nothing_else(
    write: Write, before: tuple[str, ...], after: tuple[str, ...], named: str
) -> None:
    arguments = [*before, "serve", "--config", str(write(SERVICE)), *after]
    done = CliRunner(env={"SQLBROKER_URL": "x"}).invoke(app, arguments)
    assert isinstance(done.exception, SetupError)
    assert f"--config cannot be combined with {named}" in str(done.exception)


def test_serve_refuses_a_file_with_mistakes(write: Write) -> None:
    done = CliRunner().invoke(app, ["serve", "--config", str(write(BAD))])
    assert isinstance(done.exception, ConfigError)
