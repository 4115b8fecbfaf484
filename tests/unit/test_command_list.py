"""The list of commands: it says what each command says of itself, and imports none of them."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

from faststream_sqlbroker.cli import COMPLETION_VARIABLE, main
from faststream_sqlbroker.cli.app import (
    COMMANDS,
    SHORT_COMMANDS,
    CommandGroup,
    CommandRef,
    LazyCommand,
    app,
    find_help,
)

HEAVY = ("faststream", "sqlalchemy", "pyspark", "pyspark_sqlbroker", "pydantic")
"""What the commands work with."""
HELP = f"""
import sys
from faststream_sqlbroker.cli import main
sys.argv = ["sqlbroker", *sys.argv[1:], "--help"]
try:
    main()
finally:
    sys.stderr.write(" ".join(name for name in {HEAVY} if name in sys.modules))
"""
GROUPS = {name: place for name, place in COMMANDS.items() if isinstance(place, CommandGroup)}
NARROW = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "60"}


def every_command() -> dict[str, CommandRef]:
    """All commands by their words."""
    named = {name: place for name, place in COMMANDS.items() if isinstance(place, CommandRef)}
    for name, group in GROUPS.items():
        named |= {f"{name} {word}": place for word, place in group.commands.items()}
    return named


@pytest.mark.parametrize("group", ["", "archive"])
def test_the_help_names_every_command_and_imports_none(group: str) -> None:
    """In the order of the table; the short names are not listed."""
    words = [group] if group else []
    done = subprocess.run(
        [sys.executable, "-c", HELP, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = done.stdout.partition("Commands:\n")[2].splitlines()
    names = [line.split()[0] for line in listed if line[2:3].strip()]
    assert names == list(GROUPS[group].commands if group else COMMANDS)
    assert done.stderr == ""


def test_the_list_says_what_the_commands_say() -> None:
    """The first paragraph of a docstring."""
    for name, place in every_command().items():
        module = import_module(f"faststream_sqlbroker.cli.{place.module}")
        said = inspect.getdoc(getattr(module, place.function))
        text = find_help(place)
        assert " ".join(str(said).partition("\n\n")[0].split()) == text != "", name


def test_every_command_has_a_help_of_its_own_with_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by its short name. In 60 columns the help has the same words as in 80."""
    for name in ("", *GROUPS, *every_command(), *SHORT_COMMANDS):
        said = []
        for columns in ("80", "60"):
            monkeypatch.setenv("COLUMNS", columns)
            app([*name.split(), "--help"], prog_name="sqlbroker", standalone_mode=False)
            said.append(capsys.readouterr().out)
            assert max(map(len, said[-1].splitlines())) <= int(columns), said[-1]
        assert (
            f"Usage: sqlbroker {name} [OPTIONS]".split() == said[1].split()[: len(name.split()) + 3]
        )
        assert sorted(said[0].split()) == sorted(said[1].split())


def test_a_group_lists_unless_another_command_is_named() -> None:
    for words in ("messages", "messages list", "jobs"):
        help_text = CliRunner().invoke(app, [*words.split(), "--help"], env=NARROW).output
        assert "--limit" in help_text
    for words in (["queuees"], ["messages", "shwo", "17"]):
        done = CliRunner().invoke(app, words, env=NARROW)
        assert done.exit_code == 2
        assert "Did you mean '" in done.output


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ("queues --nope", "NoSuchOption", "--nope"),
        ("queues", "SetupError", "no database given:"),
        ("archive status /no/lake", "SetupError", "folder /no/lake does not exist"),
    ],
)
def test_an_error_is_json_if_the_output_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    kind: str,
    text: str,
) -> None:
    """Once by the parser of a command, once by the command, once by one that would start Java."""
    for variable in ("SQLBROKER_URL", "SPARK_CONF_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["sqlbroker", *words.split(), *more])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        if more:
            [line] = said.err.splitlines()
            error = json.loads(line)
            assert (error["type"], error["exit_code"]) == (kind, 2)
        assert text in said.err
        assert said.err.startswith("{") is bool(more)


def test_a_command_whose_input_ends_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_input(*_: object) -> None:
        raise EOFError

    monkeypatch.setattr(LazyCommand, "load", end_input)
    for more in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["sqlbroker", "check", *more])
        with pytest.raises(SystemExit) as end:
            main()
        # A text is printed to stderr when the process ends, with the exit code 1.
        assert end.value.code == "Aborted!"


@pytest.mark.parametrize(
    ("words", "is_json", "text"),
    [
        ("publish q -- --json", False, "error: no database given:"),
        ("publish q body --key --json", False, "error: no database given:"),
        ("messages --key --json", False, "error: no database given:"),
        ("publish q body --key --json --json", True, "no database given:"),
        ("--url --json", False, "Missing command"),
        ("publish q body --nope --json --key k", True, "No such option"),
        ("queues --json --nope", True, "No such option"),
        ("qeues --json", True, "No such command"),
        ("--json queues", True, "No such option"),
    ],
)
def test_json_is_the_option_and_not_a_value(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    is_json: bool,
    text: str,
) -> None:
    """Neither the value of another option nor a word behind two dashes makes an error JSON."""
    monkeypatch.delenv("SQLBROKER_URL", raising=False)
    monkeypatch.setattr("sys.argv", ["sqlbroker", *words.split()])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert (end.value.code, said.startswith("{"), text in said) == (2, is_json, True), said


@pytest.mark.parametrize("url", ["postgresql+asyncpg://127.0.0.1:1/none", "nonsense", None])
def test_completion_never_fails_for_want_of_a_database(url: str | None) -> None:
    """Commands and options are completed all the same, and nothing is said on stderr."""
    for line, wanted in (("queues ", "pause"), ("queues --js", "--json"), ("nothing there ", "")):
        place = {"COMP_WORDS": f"sqlbroker {line}", "COMP_CWORD": str(line.count(" ") + 1)}
        runner = CliRunner(
            env={COMPLETION_VARIABLE: "complete_bash", "SQLBROKER_URL": url, **place}
        )
        done = runner.invoke(app, prog_name="sqlbroker")
        assert (done.exit_code, done.stderr) == (0, "")
        assert wanted in done.stdout.splitlines() or not wanted


def test_a_shell_gets_an_answer_whatever_fails() -> None:
    """The process ends at once, though a thread goes on that it would wait for."""
    program = """
import threading
import faststream_sqlbroker.cli.app as app
from faststream_sqlbroker.cli import main
threading.Thread(target=threading.Event().wait).start()
def fail(*words):
    print("orders")
    raise RuntimeError("not for the shell")
app.app = fail
main()
"""
    env = {**os.environ, COMPLETION_VARIABLE: "complete_bash"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("orders\n", "")
