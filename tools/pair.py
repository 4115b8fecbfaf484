"""A private PostgreSQL with a standby, which takes its place and gets the old one as its standby.

The servers are those of `tools.private`. Their threads must live as long as they do: a server ends
with the thread that started it.
"""

import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from tools.private import (
    POSTGRESQL_PLACES,
    CannotStartError,
    Process,
    folder_of,
    free_port,
    needed,
    run,
    wait_until_ready,
)

USER = "postgres"
"""The administrator, who needs no password."""
PATIENCE = 60.0
"""Seconds in which a standby must follow, and a statement must end: a machine may stand still for
some.
"""
GONE = 20.0
"""Seconds in which killed processes must have ended."""
IPC_RMID = 0
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "fsync": "off",
    "shared_buffers": "64MB",
    "max_wal_senders": "8",
    "wal_keep_size": "512MB",
    # Without it, pg_rewind cannot find what the old primary has written alone.
    "wal_log_hints": "on",
    # In a file of its folder: what it has in /dev/shm would outlive a SIGKILL.
    "dynamic_shared_memory_type": "mmap",
    "wal_retrieve_retry_interval": "200ms",
    "wal_receiver_status_interval": "1s",
}


class Node(Process):
    """One of the two servers. Its files stay when it ends."""

    def __init__(
        self, folder: Path, become: Callable[[], None], env: Mapping[str, str] | None = None
    ) -> None:
        """A server whose files will be in `folder`; `env` is added to its environment."""
        initdb = needed("initdb", "postgresql", *POSTGRESQL_PLACES)
        self.programs = Path(initdb).resolve().parent
        self.data = folder / "data"
        command = [str(self.programs / "postgres"), "-D", str(self.data)]
        super().__init__(command, become, folder, free_port(), env)

    @property
    def url(self) -> str:
        """The URL of its administrator."""
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/postgres"

    @property
    def address(self) -> str:
        """How PostgreSQL's own programs name it."""
        return f"host=127.0.0.1 port={self.port} user={USER} dbname=postgres"

    def run(self, program: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs.

        Raises:
            CannotStartError: it failed; with the last line of what it said.
        """
        run([str(self.programs / program), *arguments], self._become, self._folder)

    def configure(self, settings: Mapping[str, object]) -> None:
        """Replace its settings, for its next start; those of ALTER SYSTEM are forgotten."""
        files = {
            "postgresql.conf": "".join(f"{name} = '{value}'\n" for name, value in settings.items()),
            "postgresql.auto.conf": "",
        }
        for name, text in files.items():
            self._write(name, text)

    def follow(self, *, on: bool) -> None:
        """Let it start as a standby, or not."""
        if on:
            self._write("standby.signal", "")
        else:
            (self.data / "standby.signal").unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        path = self.data / name
        path.write_text(text)
        shutil.chown(path, self._folder.owner())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        super().start()
        wait_until_ready(self.url)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run `statements` in a session of their own, each by itself; the rows of the last one."""
        limit = f"-c statement_timeout={round(1000 * PATIENCE)}"
        with psycopg.connect(
            self.address, autocommit=True, connect_timeout=round(PATIENCE), options=limit
        ) as session:
            rows: list[tuple[Any, ...]] = []
            for statement in statements:
                cursor = session.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
            return rows

    def kill(self) -> None:
        """End all its processes by SIGKILL, also those that have been stopped."""
        if self._server is None or self._server.poll() is not None:
            return
        pid = self._server.pid
        self._server.send_signal(signal.SIGSTOP)  # it starts no more children
        children = _children(pid)
        for process in (pid, *children):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._server.wait()
        deadline = time.monotonic() + GONE
        while any(map(_is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._remove_shared_memory()

    def _remove_shared_memory(self) -> None:
        """Remove the segment that outlives a SIGKILL: a machine has room for some thousands."""
        with suppress(OSError):  # of a server that had not come so far
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            for line in lines[6:7]:
                ctypes.CDLL(None).shmctl(int(line.split()[1]), IPC_RMID, None)


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _is_alive(pid: int) -> bool:
    """Whether it holds resources: a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Pair:
    """A primary, and the server that follows it or has ended as its predecessor."""

    def __init__(
        self, nodes: tuple[Node, Node], settings: Mapping[str, str], *, synchronous: bool
    ) -> None:
        """`synchronous`: each COMMIT waits for the standby to show its rows, once that follows."""
        self.nodes = nodes
        self.primary, self.standby = nodes
        self._settings = settings
        self._synchronous = synchronous

    def begin(self) -> None:
        """Make the data, start the primary, and a standby from a copy of it."""
        options = ["-A", "trust", "-U", USER, "-E", "UTF8", "--no-sync"]
        self.primary.run("initdb", "-D", str(self.primary.data), *options)
        self._configure(self.primary)
        self.primary.start()
        self._copy()
        self.follow()

    def _configure(self, node: Node) -> None:
        [other] = [each for each in self.nodes if each is not node]
        node.configure(
            {
                **SETTINGS,
                "port": node.port,
                "unix_socket_directories": node.data.parent,
                "primary_conninfo": f"{other.address} application_name={node.data.parent.name}",
                "synchronous_commit": "remote_apply" if self._synchronous else "on",
                **self._settings,
            }
        )

    def _copy(self) -> None:
        """Start the standby from a copy of the primary."""
        shutil.rmtree(self.standby.data, ignore_errors=True)
        source = ["-h", "127.0.0.1", "-p", str(self.primary.port), "-U", USER]
        options = ["-D", str(self.standby.data), "-c", "fast", "--no-sync", "-X", "stream"]
        self.standby.run("pg_basebackup", *source, *options)
        self._start_standby()

    def _start_standby(self) -> None:
        self._configure(self.standby)
        self.standby.follow(on=True)
        self.standby.start()

    def follow(self, patience: float = PATIENCE) -> None:
        """Wait until the standby follows: a row that is written now has arrived there.

        Raises:
            CannotStartError: it does not within `patience` seconds.
        """
        deadline = time.monotonic() + patience
        number = random.randrange(2**62)  # noqa: S311
        self.primary.execute(
            "SET synchronous_commit = local",
            "CREATE TABLE IF NOT EXISTS probe (number bigint)",
            f"INSERT INTO probe VALUES ({number})",
        )
        while not self._has_arrived(number):
            if time.monotonic() > deadline or not self.standby.runs:
                msg = f"the standby does not follow: see {self.standby.log}"
                raise CannotStartError(msg)
            time.sleep(0.02)
        if self._synchronous:
            self._wait_for_it()
            while self.primary.execute("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
                if time.monotonic() > deadline:
                    msg = f"the standby is not synchronous: see {self.standby.log}"
                    raise CannotStartError(msg)
                time.sleep(0.02)

    def _has_arrived(self, number: int) -> bool:
        try:
            return bool(self.standby.execute(f"SELECT 1 FROM probe WHERE number = {number}"))
        except psycopg.Error:
            return False  # the table has not arrived yet, or it still starts

    def _wait_for_it(self) -> None:
        """Let each COMMIT wait for the standby from now on."""
        self.primary.execute(
            "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"
        )

    def hold(self) -> None:
        """Stop what sends the primary's changes: commits go on, and the standby falls behind."""
        self._signal_senders(signal.SIGSTOP)

    def release(self) -> None:
        """Let it go on."""
        self._signal_senders(signal.SIGCONT)

    def _signal_senders(self, number: int) -> None:
        for (pid,) in self.primary.execute("SELECT pid FROM pg_stat_replication"):
            os.kill(pid, number)

    def promote(self) -> None:
        """Let the standby take over, whether the primary has ended or not; it is then `standby`."""
        self.standby.execute(f"SELECT pg_promote(true, {PATIENCE:.0f})")
        self.primary, self.standby = self.standby, self.primary
        self.primary.execute("INSERT INTO probe VALUES (0)")

    def rejoin(self) -> None:
        """Start the old primary, which has ended, as the standby: rewound to where both were equal.

        Raises:
            CannotStartError: it cannot be rewound, or does not follow then.
        """
        # Without it, pg_rewind may read the old timeline from the new primary, and find nothing to
        # do.
        self.primary.execute("CHECKPOINT")
        self.standby.follow(on=False)
        source = f"--source-server={self.primary.address}"
        self.standby.run("pg_rewind", "-D", str(self.standby.data), source, "--no-sync")
        self._start_standby()
        self.follow()

    def end(self) -> None:
        """End both."""
        for node in self.nodes:
            node.kill()


@contextmanager
def pair(
    *, synchronous: bool = False, second_env: Mapping[str, str] | None = None, **settings: str
) -> Iterator[Pair]:
    """A running pair; `second_env` is added to the environment of the first standby, `settings` to
    those of both servers.

    Raises:
        CannotStartError: this machine does not give it.
    """
    with folder_of("postgres") as (folder, become):
        homes = [folder / name for name in ("first", "second")]
        for home in homes:
            home.mkdir()
            shutil.chown(home, folder.owner())
        nodes = Node(homes[0], become), Node(homes[1], become, second_env)
        made = Pair(nodes, settings, synchronous=synchronous)
        try:
            made.begin()
            yield made
        finally:
            made.end()
