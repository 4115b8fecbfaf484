"""A process of its own without the second and a half that a new interpreter takes to import
everything.

Forked from a server that has imported the workers and opened nothing: SQLite must not be carried
over a fork.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
WORKERS = ("worker", "policy_worker", "locker", "requester", "scheduler")
DRIVERS = ("aiomysql", "aiosqlite", "asyncpg")
LATE = ("anyio._backends._asyncio", "cryptography.hazmat.primitives.asymmetric.rsa")
"""What a worker would import when it runs, and when it logs in."""
_CONTEXT = multiprocessing.get_context("forkserver")
_PROGRAMS = ("tests.faults.worker", *(f"tests.processes.{name}" for name in WORKERS))
_CONTEXT.set_forkserver_preload([*_PROGRAMS, *DRIVERS, *LATE, "tests.fork_server"])


class Forked:
    """A process that calls `run` with `arguments`; used like `subprocess.Popen`."""

    def __init__(
        self,
        run: Callable[..., object],
        *arguments: Any,
        said: Path | None = None,
        errors: Path | None = None,
    ) -> None:
        """Start it; `run` is a function of a module.

        Its output is appended to the file `said`, and that of stderr to `errors`, if it is given.
        """
        printed = os.devnull if said is None else str(said)
        streams = (printed, printed if errors is None else str(errors))
        self._process = _CONTEXT.Process(
            target=_redirected, args=(streams, run, *arguments), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """As `poll` says."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without asking."""
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


def start(
    module: str, *arguments: str, said: Path, env: Mapping[str, str] | None = None
) -> Process:
    """Start what `python -m MODULE ARGUMENTS` starts; what it prints is appended to the file
    `said`.

    `env` is added to the environment. A library that is to be preloaded needs an interpreter of its
    own.
    """
    given = dict(env or {})
    if "LD_PRELOAD" not in given:
        return Forked(_main, module, arguments, given, said=said)
    command = [sys.executable, "-m", module, *arguments]
    with said.open("ab") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **given}, stdout=out, stderr=out
        )


def python(
    *words: str,
    said: Path,
    errors: Path | None = None,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> Forked:
    """Start what `python WORDS` starts in `folder`, with the environment `env`, or ours.

    The first word is a file, or "-c" or "-m". What is printed goes to files, as `Forked` says. The
    program may not start processes by `multiprocessing`.
    """
    whole = dict(os.environ if env is None else env)
    return Forked(_python, words, str(folder), whole, said=said, errors=errors)


def finished(
    *words: str, folder: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = 240
) -> "subprocess.CompletedProcess[str]":
    """What `python WORDS` has printed, and its exit code; `folder` and `env` as for `python`.

    Raises:
        TimeoutError: it still runs after `timeout` seconds; it is killed.
    """
    with TemporaryDirectory() as kept:
        said, errors = Path(kept, "said"), Path(kept, "errors")
        process = python(*words, said=said, errors=errors, folder=folder, env=env)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, said.read_text(), errors.read_text())


def _python(words: tuple[str, ...], folder: str, env: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    first, *rest = words
    given = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [{"-c": "", "-m": folder}.get(first, str(Path(first).parent)), *given]
    sys.argv = [first, *rest[1:]] if first.startswith("-") else [first, *rest]
    try:
        if first == "-c":
            module = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(module))
        elif first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _main(module: str, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    os.environ.update(env)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def _redirected(streams: tuple[str, str], run: Callable[..., object], *arguments: Any) -> None:
    for number, printed in enumerate(streams, 1):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin.close()
    run(*arguments)
