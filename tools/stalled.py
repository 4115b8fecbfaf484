"""A machine that stands still at times: stop random processes of a command, two seconds each.

    python -m tools.stalled [--seed N] [--every SECONDS] -- COMMAND...

About every 20 seconds one process that descends from COMMAND is stopped (SIGSTOP) and goes on after
two seconds (SIGCONT): a test worker, a child of one, a database server with all of its processes,
or a JVM. The seed fixes the moments and the draws; which processes there are to draw from is
COMMAND's. Each stop is a line of the file that `SQLBROKER_STALLS` names to COMMAND, and the end
tells their number by kind.
"""

import argparse
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.servers import leave_in_order

MEAN_PAUSE = 20.0
"""Seconds between two stops, unless told; each pause is drawn from half of it to one and a half."""
STALL = 2.0
"""Seconds that a process is stopped."""
VARIABLE = "SQLBROKER_STALLS"
PR_SET_CHILD_SUBREAPER = 36
SERVERS = ("postgres", "mariadbd", "mysqld", "pgbouncer", "redis-server")


@dataclass(frozen=True)
class Process:
    """A process of the command, as /proc has it."""

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def kind(self) -> str | None:
        """What it is: "server", "JVM", "worker" or "child"; None for what only waits."""
        name = Path(self.words[0]).name if self.words else ""
        if name.startswith("ld-linux"):  # a MySQL that is not installed
            name = next((n for w in self.words if (n := Path(w).name) in SERVERS), "")
        if name.rstrip(":").startswith(SERVERS):
            return "server"
        if name == "java":
            return "JVM"
        if not name.startswith("python"):
            return None
        if "tools.servers" in self.words or "tools.stalled" in self.words:
            return None
        if any(word.startswith("import sys;exec(eval(") for word in self.words):  # execnet
            return "worker"
        return "child"


def processes_of(root: int) -> list[Process]:
    """All processes that descend from `root`."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # It may just have ended.
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                pid = int(entry.name)
                found[pid] = Process(
                    pid, int(parent), tuple(w.decode(errors="replace") for w in words)
                )

    def descends(pid: int) -> bool:
        while pid in found:
            pid = found[pid].parent
            if pid == root:
                return True
        return False

    return [process for pid, process in sorted(found.items()) if descends(pid)]


def draw(processes: list[Process], chance: random.Random) -> list[Process]:
    """The processes to stop at once: one of a random kind, with its tree if it is a server."""
    kinds: dict[str, list[Process]] = defaultdict(list)
    servers = {p.pid for p in processes if p.kind == "server"}
    for process in processes:
        # A server's own processes are stopped with it.
        if process.kind is not None and process.parent not in servers:
            kinds[process.kind].append(process)
    if not kinds:
        return []
    chosen = chance.choice(kinds[chance.choice(sorted(kinds))])
    if chosen.kind != "server":
        return [chosen]
    return [chosen, *(process for process in processes if process.parent == chosen.pid)]


def stall(stopped: list[Process]) -> None:
    """Stop the processes for `STALL` seconds."""
    try:
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STALL)
    finally:
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def has_ended(pid: int) -> int | None:
    """The exit code of our child `pid`, if it has ended; other children are only reaped."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None


@contextlib.contextmanager
def _ended_with_us(child: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """End `child` when this process is ended."""
    try:
        yield child
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
        while has_ended(child.pid) is None:
            time.sleep(0.1)
        raise


def run(command: list[str], seed: int, every: float = MEAN_PAUSE) -> int:
    """Run `command` with a stop about each `every` seconds; its exit code."""
    # What outlives its parent becomes our child, so that it is found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    chance = random.Random(seed)  # noqa: S311
    told: Counter[str] = Counter()
    with (
        tempfile.NamedTemporaryFile("w", prefix="stalls-") as log,
        _ended_with_us(subprocess.Popen(command, env={**os.environ, VARIABLE: log.name})) as child,
    ):
        code: int | None = None
        while code is None:
            until = time.monotonic() + every * chance.uniform(0.5, 1.5)
            while code is None and time.monotonic() < until:
                time.sleep(0.1)
                code = has_ended(child.pid)
            stopped = draw(processes_of(os.getpid()), chance) if code is None else []
            if stopped:
                what = stopped[0]
                told[str(what.kind)] += 1
                words = " ".join(" ".join(what.words).split())  # a program in it may have lines
                log.write(f"{time.time():.1f} {what.kind} {what.pid} {words[:80]}\n")
                log.flush()
                stall(stopped)
    kinds = ", ".join(f"{kind} {count}" for kind, count in told.most_common())
    print(f"seed {seed}: stopped {told.total()} times for {STALL} s: {kinds}", file=sys.stderr)
    return code


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.stalled")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))  # noqa: S311
    parser.add_argument("--every", type=float, default=MEAN_PAUSE)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    leave_in_order()
    return run(given.command, given.seed, given.every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
