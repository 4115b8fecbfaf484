"""Servers for the tests: those configured, those already listening, or private ones that end with
us.

    python -m tools.servers run [--durable] [--only postgresql,mariadb] -- COMMAND...

runs COMMAND with the addresses in `SQLBROKER_TEST_POSTGRESQL_URL`, `…_MARIADB_URL` and
`…_MYSQL_URL`, and for each of them `…_URL_VERSION` and, of a server started here, the file
`…_URL_LOG`. At the end it tells how much the servers that it started have worked. With `--durable`
those keep each commit on disk, in the folder for temporary files (`TMPDIR`).
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text

from tools import compose, private

VARIABLES = {
    "postgresql": "SQLBROKER_TEST_POSTGRESQL_URL",
    "mariadb": "SQLBROKER_TEST_MARIADB_URL",
    "mysql": "SQLBROKER_TEST_MYSQL_URL",
}
LISTENING = {
    "postgresql": (
        "postgresql+psycopg://postgres@127.0.0.1:5432/postgres",
        compose.URLS["postgresql"],
    ),
    "mariadb": ("mariadb+pymysql://root@127.0.0.1:3306/mysql", compose.URLS["mariadb"]),
    "mysql": (
        "mysql+pymysql://root@127.0.0.1:3306/mysql",
        "mysql+pymysql://root@127.0.0.1:3307/mysql",
        compose.URLS["mysql"],
    ),
}
"""Where a developer's server usually is, and who may use it without being told. MySQL and MariaDB
share a port: what answers there is asked what it is."""

LOGS: dict[str, Path] = {}
"""What the servers started here say, by their URLs."""

FAMILY = ("mariadb", "mysql")
"""Kinds whose servers take each other's clients."""

QUICK = 2
"""Seconds to wait for a server that may or may not be there."""

PATIENT = 30
"""Seconds to wait for a server that the environment names."""

PATIENCE = 10.0
"""Seconds that the command gets to end by itself when we are told to."""


class NoServerError(Exception):
    """No server could be found or started; the text says what was tried."""

    excused = False
    """Whether its tests may be skipped in CI, too."""


@contextmanager
def server(kind: str, *, durable: bool = False) -> Iterator[str]:
    """Give the URL of an administrator of a `kind` server; one started here ends with the context,
    and keeps each commit on disk if it is `durable`.

    Raises:
        NoServerError: there is none; in one line what is missing. Excused if what brings it cannot
            be downloaded.
    """
    if given := os.environ.get(VARIABLES[kind]):
        if (problem := problem_of(kind, given, PATIENT)) is not None:
            msg = f"the {kind} server of {VARIABLES[kind]} cannot be used: {problem}"
            raise NoServerError(msg)
        yield given
        return
    for url in LISTENING[kind]:
        if problem_of(kind, url) is None:
            yield url
            return
    reasons: list[private.CannotStartError] = []
    starters: list[Callable[[], AbstractContextManager[str]]]
    starters = [
        lambda: _private(kind, durable=durable),
        lambda: compose.start(kind, lambda url: problem_of(kind, url) is None),
    ]
    for start in starters:
        with ExitStack() as stack:
            try:
                url = stack.enter_context(start())
            except private.CannotStartError as error:
                reasons.append(error)
                continue
            yield url
            return
    missing = NoServerError(
        f"no {kind} server: set {VARIABLES[kind]}; {'; '.join(map(str, reasons))}"
    )
    missing.excused = isinstance(reasons[0], private.CannotDownloadError)
    raise missing


@contextmanager
def own_server(kind: str) -> Iterator[str]:
    """As `server`, but no other process uses it, if one can be started here."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(_private(kind))
        except private.CannotStartError:
            url = stack.enter_context(server(kind))
        yield url


@contextmanager
def _private(kind: str, *, durable: bool = False) -> Iterator[str]:
    with private.STARTERS[kind](durable=durable) as (url, process):
        LOGS[url] = process.log
        yield url


def problem_of(kind: str, url: str, timeout: int = QUICK) -> str | None:
    """Why no server of `kind` can be used at `url`; None if one lets us in within `timeout`
    seconds.
    """
    engine = create_engine(url, connect_args={"connect_timeout": timeout})
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
            if kind in FAMILY and getattr(engine.dialect, "is_mariadb", False) != (
                kind == "mariadb"
            ):
                return f"what answers there is no {kind}"
    except Exception as error:  # noqa: BLE001 - whatever is wrong, it is not usable
        return str(error).splitlines()[0]
    finally:
        engine.dispose()
    return None


def run(
    kinds: list[str],
    command: list[str],
    say: Callable[[str], object],
    *,
    durable: bool = False,
) -> int:
    """Run `command` with the servers' addresses; its exit code, 1 if a server is missing in CI
    without an excuse.
    """
    environment = dict(os.environ)
    with ExitStack() as stack:
        for kind in kinds:
            try:
                url = stack.enter_context(_counted(kind, say, durable=durable))
            except NoServerError as error:
                say(str(error))
                if os.environ.get("CI") and not error.excused:
                    return 1
                environment[f"{VARIABLES[kind]}_MISSING"] = str(error)
                continue
            environment[VARIABLES[kind]] = url
            environment[f"{VARIABLES[kind]}_VERSION"] = version_of(url)
            if url in LOGS:
                environment[f"{VARIABLES[kind]}_LOG"] = str(LOGS[url])
        return _execute(command, environment)


@contextmanager
def _counted(kind: str, say: Callable[[str], object], *, durable: bool) -> Iterator[str]:
    """As `server`; say at the end what one that was started here has cost."""
    with ExitStack() as stack:
        yield stack.enter_context(server(kind, durable=durable))
        before = _seconds_of_children()
        stack.close()
        if seconds := round(_seconds_of_children() - before):
            say(f"CPU seconds of {kind}: {seconds}")


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def version_of(url: str) -> str:
    """What the server of `url` says that it is."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return str(connection.scalar(text("SELECT version()")))
    finally:
        engine.dispose()


def _execute(command: list[str], environment: dict[str, str]) -> int:
    """Wait for `command`; it never outlives the servers it was given."""
    with subprocess.Popen(command, env=environment) as child:
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


def leave_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process by the ordinary way, so that what it has started or
    stopped, and its folders, do not stay.
    """

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def main(arguments: list[str]) -> int:
    """The command line."""
    head, separator, command = _split(arguments)
    kinds = list(VARIABLES)
    durable = "--durable" in head
    head = [part for part in head if part != "--durable"]
    if len(head) == 3 and head[1] == "--only" and VARIABLES.keys() >= set(head[2].split(",")):
        kinds = head[2].split(",")
        head = head[:1]
    if head != ["run"] or not separator or not command:
        print(__doc__, file=sys.stderr)
        return 2
    leave_in_order()
    return run(kinds, command, lambda line: print(line, file=sys.stderr), durable=durable)


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return arguments, False, []
    at = arguments.index("--")
    return arguments[:at], True, arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
