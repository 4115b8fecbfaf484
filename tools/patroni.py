"""A private pair of PostgreSQL servers that Patroni keeps, with etcd and with HAProxy before it.

Patroni, etcd, HAProxy and the Python that runs Patroni are Debian's packages, unpacked into the
cache folder; PostgreSQL is that of `tools.private`.
"""

import http.client
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import OK
from pathlib import Path
from typing import Any

import psycopg

from tools import subreaper
from tools.pair import SETTINGS, USER, Node, Pair
from tools.private import (
    CannotDownloadError,
    CannotStartError,
    folder_of,
    free_port,
    running,
)
from tools.unstable import DownloadError, Packages, unpacked

PACKAGES = Packages(
    "patroni-trixie",
    "trixie",
    ("patroni", "python3-etcd", "etcd-server", "haproxy", "python3"),
    {"bin/python3.13": {}, "bin/etcd": {}, "sbin/haproxy": {}},
    60,
)
"""Of one Debian, whatever this machine has, so that the versions are the same everywhere."""
PATRONI = "root/usr/bin/patroni"
"""In the folder of the packages."""
TTL = 20
"""Seconds until the lock of a primary that has ended is free. Patroni takes nothing shorter."""
LOOP_WAIT = 2
"""Seconds between two looks of Patroni."""
RETRY_TIMEOUT = 9
"""Seconds for which etcd may stand still before the primary gives up. Patroni wants
`LOOP_WAIT + 2 * RETRY_TIMEOUT` to be at most `TTL`."""
TAKEN_OVER = 120.0
"""Seconds in which Patroni must have done what it is asked, or has to do by itself."""
SLICE = 10.0
"""Seconds after which roles are looked up again: another takeover may have come."""
PAUSE = 0.1
"""Seconds between two looks of ours."""
HEARTBEAT = 50
"""Milliseconds between two heartbeats of etcd."""


class Member(Node):
    """A server with its Patroni, which ends with all its processes at once."""

    def __init__(self, folder: Path, become: Callable[[], None], programs: Path) -> None:
        """A member whose files will be in `folder`; `programs` are the unpacked ones."""
        super().__init__(folder, become)
        self.name = folder.name
        self.rest_port = free_port()
        # The server's user may not be able to read this repository, nor run its Python.
        script = Path(shutil.copy(subreaper.__file__, folder))
        script.chmod(0o644)
        python = str(programs / "python3.13")
        self._command = [python, str(script), python, str(programs / PATRONI)]

    def start_with(self, etcd: int, *, synchronous: bool) -> None:
        """Write its configuration, start it for the first time, and wait until it answers."""
        file = self._folder / "patroni.json"  # JSON is YAML, too
        file.write_text(json.dumps(configuration(self, etcd, synchronous=synchronous)))
        shutil.chown(file, self._folder.owner())
        self._command.append(str(file))
        self.start()

    def kill(self) -> None:
        """End PostgreSQL and Patroni, all processes by SIGKILL."""
        self.stop()

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 5.0
    ) -> tuple[int, str]:
        """The status and the text that Patroni answers; the status is 0 if it does not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    def has_role(self, role: str) -> bool:
        """Whether Patroni says that it is the `primary`, or the standby that is in `sync`."""
        # As HAProxy asks: the answer to GET waits for a server that starts.
        return self.ask("OPTIONS", f"/{role}")[0] == OK

    def status(self) -> dict[str, Any]:
        """What Patroni says of it; nothing if it does not answer."""
        try:
            answer = json.loads(self.ask("GET", "/patroni")[1])
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}


def configuration(member: Member, etcd: int, *, synchronous: bool) -> dict[str, Any]:
    """Patroni's configuration of `member`; `etcd` is the port of that."""
    rest = f"127.0.0.1:{member.rest_port}"
    server = f"127.0.0.1:{member.port}"
    folder = member.data.parent
    return {
        "scope": "sqlbroker",
        "name": member.name,
        "restapi": {"listen": rest, "connect_address": rest},
        "etcd3": {"hosts": f"127.0.0.1:{etcd}"},
        "watchdog": {"mode": "off"},
        "bootstrap": {
            "dcs": {
                "ttl": TTL,
                "loop_wait": LOOP_WAIT,
                "retry_timeout": RETRY_TIMEOUT,
                # The other takes over however far it is behind.
                "maximum_lag_on_failover": 2**30,
                "synchronous_mode": synchronous,
                "postgresql": {
                    "use_pg_rewind": True,
                    "parameters": {
                        name: value
                        for name, value in SETTINGS.items()
                        if name != "listen_addresses"  # Patroni sets it
                    },
                },
            },
            "initdb": [{"encoding": "UTF8"}],
        },
        "postgresql": {
            "listen": server,
            "connect_address": server,
            "data_dir": str(member.data),
            "bin_dir": str(member.programs),
            "pgpass": str(folder / "pgpass"),
            "parameters": {"unix_socket_directories": str(folder)},
            "basebackup": [{"checkpoint": "fast"}],
            "pg_hba": [
                "local all all trust",
                "host all all 127.0.0.1/32 trust",
                "host replication all 127.0.0.1/32 trust",
            ],
            "authentication": {
                role: {"username": USER} for role in ("superuser", "replication", "rewind")
            },
        },
    }


def haproxy_configuration(port: int, members: Sequence[Member]) -> str:
    """HAProxy's configuration: `port` leads to that of `members` which is the primary.

    It does not repeat a connect: a session that waits for its next try when its server is marked
    down stays open without an answer. Clients try again themselves.
    """
    servers = "".join(
        f"    server {each.name} 127.0.0.1:{each.port} check port {each.rest_port}\n"
        for each in members
    )
    return f"""global
    maxconn 1000
defaults
    mode tcp
    retries 0
    timeout connect 1s
    timeout queue 1s
    timeout client 1h
    timeout server 1h
    timeout check 3s
listen primary
    bind 127.0.0.1:{port}
    option httpchk OPTIONS /primary
    http-check expect status 200
    default-server inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
{servers}"""


class Patroni(Pair):
    """A pair of which Patroni decides who is the primary; `primary` and `standby` are as seen last.

    Patroni decides only while it is not paused: then no machine that stands still makes one server
    take the place of the other.
    """

    nodes: tuple[Member, Member]
    primary: Member
    standby: Member

    def __init__(
        self, nodes: tuple[Member, Member], etcd: int, haproxy: int, *, synchronous: bool
    ) -> None:
        """`etcd` and `haproxy` are the ports of these.

        `synchronous`: a COMMIT waits for the standby, and only one that has it all takes over.
        """
        super().__init__(nodes, {}, synchronous=synchronous)
        self._etcd = etcd
        self.haproxy_port = haproxy
        self.timeline = 0
        """Of the primary, when `wait_until_led` returned last: each takeover adds one."""

    def begin(self) -> None:
        """Start the first server, and the other from a copy of it; then pause Patroni."""
        for node in self.nodes:
            node.start_with(self._etcd, synchronous=self._synchronous)
        self.follow()
        self.wait_until_led()
        self.pause(on=True)

    def look(self) -> bool:
        """Whether one of them is the primary: it has the lock and is no standby."""
        for node, other in zip(self.nodes, reversed(self.nodes), strict=True):
            if node.has_role("primary"):
                self.primary, self.standby = node, other
                return True
        return False

    def follow(self, patience: float = TAKEN_OVER) -> None:
        """As that of a pair; Patroni lets the standby take over, too. Roles may change in it.

        Raises:
            CannotStartError: it does not follow within `patience` seconds.
        """
        deadline = time.monotonic() + patience
        while not self._follows():
            _sleep(deadline, "the standby does not follow", self)

    def _follows(self) -> bool:
        if not self.look():
            return False
        with suppress(psycopg.Error, CannotStartError):
            super().follow(SLICE)
            # Patroni writes down later than PostgreSQL that it is synchronous.
            return not self._synchronous or self.standby.has_role("sync")
        return False

    def _wait_for_it(self) -> None:
        """Patroni makes each COMMIT wait."""

    def pause(self, *, on: bool) -> None:
        """Let Patroni decide nothing from now on, or let it decide again.

        Raises:
            CannotStartError: it does not do so in time.
        """
        deadline = time.monotonic() + TAKEN_OVER
        while not all(bool(node.status().get("pause")) == on for node in self.nodes if node.runs):
            self.primary.ask("PATCH", "/config", {"pause": on})
            _sleep(deadline, f"Patroni does not become {'paused' if on else 'active'}", self)

    def switch_over(self, patience: float = TAKEN_OVER) -> None:
        """Let the standby take over while both are well.

        Raises:
            CannotStartError: it does not within `patience` seconds.
        """
        old = self.primary
        deadline = time.monotonic() + patience
        wanted = {"leader": old.name, "candidate": self.standby.name}
        said = "no answer yet"
        # It answers up to a second later than it is done.
        pool = ThreadPoolExecutor(1)
        asked = pool.submit(old.ask, "POST", "/switchover", wanted, TAKEN_OVER)
        try:
            while not (self.look() and self.primary is not old):
                if asked.done():
                    said = asked.result()[1]
                    asked = pool.submit(old.ask, "POST", "/switchover", wanted, TAKEN_OVER)
                _sleep(deadline, f"no switchover: {said}", self)
        finally:
            pool.shutdown(wait=False)

    def rejoin(self) -> None:
        """Start the server that has ended: Patroni rewinds it to where both were equal."""
        self.standby.start()
        self.follow()

    def wait_until_led(self) -> None:
        """Wait until one of them takes writes, and HAProxy leads to it.

        Raises:
            CannotStartError: there is none in time.
        """
        deadline = time.monotonic() + TAKEN_OVER
        while not self._is_led():
            _sleep(deadline, "no server takes writes", self)

    def _is_led(self) -> bool:
        if not self.look():
            return False
        through = f"host=127.0.0.1 port={self.haproxy_port} user={USER} dbname=postgres"
        with suppress(psycopg.Error):
            [(timeline,)] = self.primary.execute(
                "SET synchronous_commit = local",
                "INSERT INTO probe VALUES (0)",
                "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)",
            )
            self.timeline = int(timeline, 16)
            # HAProxy takes turns among those that it believes to be the primary.
            return all(_port(through) == self.primary.port for _ in self.nodes)
        return False

    def roles(self) -> str:
        """What Patroni says of each server, for an error."""
        return "; ".join(f"{node.name} {node.status()}, see {node.log}" for node in self.nodes)


def _port(address: str) -> int:
    """The port of the server that answers at `address`."""
    with psycopg.connect(address, connect_timeout=5) as session:
        return int(session.execute("SELECT inet_server_port()").fetchall()[0][0])


def _sleep(deadline: float, problem: str, servers: Patroni) -> None:
    """Wait before the next look.

    Raises:
        CannotStartError: it is later than `deadline`; with the `problem`.
    """
    if time.monotonic() > deadline:
        msg = f"{problem}: {servers.roles()}"
        raise CannotStartError(msg)
    time.sleep(PAUSE)


@contextmanager
def patroni(*, synchronous: bool = False) -> Iterator[Patroni]:
    """A running pair, paused.

    Raises:
        CannotStartError: this machine does not give it.
    """
    try:
        programs = unpacked(PACKAGES)
    except DownloadError as error:
        msg = f"Patroni cannot be downloaded ({error})"
        raise CannotDownloadError(msg) from None
    with ExitStack() as stack:
        folder, become = stack.enter_context(folder_of("postgres"))
        homes = {name: folder / name for name in ("etcd", "haproxy", "first", "second")}
        for home in homes.values():
            home.mkdir()
            shutil.chown(home, folder.owner())
        nodes = (
            Member(homes["first"], become, programs),
            Member(homes["second"], become, programs),
        )
        etcd, haproxy = free_port(), free_port()
        command = etcd_command(str(programs / "etcd"), homes["etcd"], etcd)
        stack.enter_context(running(command, become, homes["etcd"], etcd))
        file = homes["haproxy"] / "haproxy.cfg"
        file.write_text(haproxy_configuration(haproxy, nodes))
        # Before the servers: it takes each for the primary until it has asked it.
        command = [str(programs / "haproxy"), "-db", "-f", str(file)]
        stack.enter_context(running(command, become, homes["haproxy"], haproxy))
        made = Patroni(nodes, etcd, haproxy, synchronous=synchronous)
        stack.callback(made.end)
        made.begin()
        yield made


def etcd_command(program: str, folder: Path, port: int) -> list[str]:
    """The command of an etcd of a single member, whose clients reach it at `port`."""
    clients = f"http://127.0.0.1:{port}"
    peers = f"http://127.0.0.1:{free_port()}"
    options = {
        "name": "only",
        "data-dir": folder / "data",
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"only={peers}",
        "heartbeat-interval": HEARTBEAT,
        "election-timeout": 10 * HEARTBEAT,
    }
    return [program, "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in options.items())]
