"""A private Galera cluster: MariaDB servers that replicate to each other, all of which take writes.

The servers are those of `tools.private`. Debian 12's package of MariaDB brings Galera's library;
where it is missing it is unpacked into the cache folder, not installed.
"""

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools import nodes
from tools.nodes import PROBES, TIMEOUT
from tools.packages import UnpackError, unpack
from tools.private import (
    CannotDownloadError,
    CannotStartError,
    find,
    folder_of,
    free_ports,
    install_mariadb,
    mariadb_server,
    mariadb_url,
)
from tools.unstable import DownloadError

PACKAGE = "galera-4"
LIBRARY = "libgalera_smm.so"
PLACES = ("/usr/lib/galera", "/usr/lib/galera-4", "/usr/lib64/galera-4")
PATIENT = 30.0
"""Seconds after which the others go on without a node that says nothing: a machine that stands
still for some seconds must not split the group."""


class Node(nodes.Node):
    """A server of a cluster, which `start` joins again after a `stop` or a `crash`."""

    def __init__(self, folder: Path, become: Callable[[], None], ports: list[int]) -> None:
        """A node whose files are in `folder`.

        `ports` are those of clients, of the group, of missed changes and of a copy of all data.
        """
        super().__init__(mariadb_server(folder, ports[0]), become, folder, ports[0])
        self._plain_command = self._command
        self._ports = ports

    @property
    def url(self) -> str:
        """The URL of its administrator."""
        return mariadb_url(self.port)

    @property
    def group_address(self) -> str:
        """Where the other nodes reach it."""
        return f"127.0.0.1:{self._ports[1]}"

    def configure(self, library: str, members: list["Node"], patience: float) -> None:
        """Make it a node of the cluster of `members`, of which the others go on without one that
        says nothing for `patience` seconds.
        """
        _, group, changes, copy = self._ports
        provider = {
            "base_port": group,
            "gmcast.listen_addr": f"tcp://{self.group_address}",
            "ist.recv_addr": f"127.0.0.1:{changes}",
            "gcache.size": "32M",
            "evs.suspect_timeout": f"PT{patience:g}S",
            "evs.inactive_timeout": f"PT{2 * patience:g}S",
            "evs.install_timeout": f"PT{2 * patience:g}S",
        }
        self._plain_command += [
            "--wsrep-on=ON",
            f"--wsrep-provider={library}",
            f"--wsrep-provider-options={';'.join(f'{n}={v}' for n, v in provider.items())}",
            "--wsrep-cluster-name=sqlbroker",
            f"--wsrep-node-name={self._folder.name}",
            f"--wsrep-node-address={self.group_address}",
            "--wsrep-sst-method=rsync",
            f"--wsrep-sst-receive-address=127.0.0.1:{copy}",
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=32M",
        ]
        self._members = ",".join(member.group_address for member in members)

    def start(self, *, first: bool = False) -> None:
        """Start it, and wait until it takes writes; the `first` one of the cluster has no others.

        Raises:
            CannotStartError: it ended, or is no part of the cluster in time.
        """
        address = f"--wsrep-cluster-address=gcomm://{'' if first else self._members}"
        self._command = [*self._plain_command, address, *([] if first else self._recover())]
        super().start()
        self.wait_until(self.is_synced, "is no part of its cluster")

    def _recover(self) -> list[str]:
        """Options with the last change that it has: a crash has not written that down."""
        if not (self._folder / "data" / "ibdata1").exists():
            return []
        done = subprocess.run(
            [*self._plain_command, "--wsrep-recover"],
            preexec_fn=self._become,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        found = re.findall(r"Recovered position:? ?([0-9a-f-]{36}:-?\d+)", done.stdout)
        return [f"--wsrep-start-position={found[-1]}"] if found else []

    def pause(self) -> None:
        """Let it stand still: after some seconds the others go on without it."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on; it joins the others again by itself."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._server is not None:
            self._server.send_signal(number)

    def is_synced(self) -> bool:
        """Whether it takes writes, as a part of the cluster that has the majority.

        Raises:
            pymysql.Error: it does not answer.
        """
        ready, state = map(self.status, ("wsrep_ready", "wsrep_local_state_comment"))
        return (ready, state) == ("ON", "Synced")

    def status(self, name: str) -> str:
        """The value of a status variable, such as wsrep_cluster_size."""
        [(_, value)] = self.execute(f"SHOW GLOBAL STATUS WHERE Variable_name = '{name}'")
        return str(value)


@contextmanager
def cluster(size: int = 2, *, patience: float = PATIENT) -> Iterator[list[Node]]:
    """A cluster of `size` nodes, all started; their root needs no password.

    After `patience` seconds the others go on without a node that says nothing.

    Raises:
        CannotStartError: a node does not start, or Galera's library is not on this machine and
            cannot be downloaded.
    """
    with ExitStack() as stack:
        folder, become = stack.enter_context(folder_of("mysql"))
        ports = free_ports(4 * size)
        members: list[Node] = []
        for number in range(size):
            place = folder / f"node{number}"
            place.mkdir()
            shutil.chown(place, folder.owner())
            members.append(Node(place, become, ports[4 * number : 4 * number + 4]))
        install_mariadb(folder / "node0", become)
        library = _library()  # the package of the server may have brought it
        for node in members:
            node.configure(library, members, patience)
            stack.callback(node.crash)
            node.start(first=node is members[0])
        members[0].execute(*PROBES)
        yield members


def _library(places: Sequence[str] = PLACES, unpack: Callable[[str, str], Path] = unpack) -> str:
    """Path of Galera's library: installed, unpacked before, or unpacked now.

    Raises:
        CannotDownloadError: it is not there, and its package cannot be downloaded.
        CannotStartError: its package does not bring it, or cannot be unpacked.
    """
    if path := find(LIBRARY, *places):
        return path
    made = f"{PLACES[0]}/{LIBRARY}"[1:]
    try:
        return str(unpack(PACKAGE, made) / made)
    except (DownloadError, UnpackError) as error:
        failed = CannotDownloadError if isinstance(error, DownloadError) else CannotStartError
        raise failed(f"{LIBRARY} is not installed ({error})") from None
