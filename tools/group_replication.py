"""A private replication group of MySQL servers, of which one at a time takes writes.

The servers are those of `tools.private`.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pymysql

from tools import nodes
from tools.nodes import PROBES
from tools.private import folder_of, free_ports, install_mysql, mysql_server

NAME = "5a2d6a0e-7b54-4a5e-9c1f-0d5f3c1b8e21"
"""Of the group; addresses tell those of one machine apart."""
SWITCH_TIMEOUT = 60.0
"""Seconds for a planned change of the primary."""
RUNNING = 5
"""Seconds that open transactions get for their end when the primary is changed."""


class Node(nodes.Node):
    """A server of a group, which `start` joins again after a `stop` or a `crash`."""

    def __init__(self, folder: Path, become: Callable[[], None], ports: list[int]) -> None:
        """A node whose files are in `folder`; `ports` are those of clients and of the group."""
        super().__init__(mysql_server(folder, ports[0]), become, folder, ports[0])
        self.group_address = f"127.0.0.1:{ports[1]}"

    def configure(self, number: int, members: list["Node"]) -> None:
        """Make it the member `number` of the group of `members`."""
        group = {
            "group-name": NAME,
            "local-address": self.group_address,
            "group-seeds": ",".join(member.group_address for member in members),
            "start-on-boot": "OFF",
            # The others go on 7 seconds after a member has ended; with any other number after 22.
            # One that only stood still joins again by itself.
            "member-expel-timeout": 0,
            "message-cache-size": 2**27,
        }
        self._command += [
            f"--server-id={number + 1}",
            "--report-host=127.0.0.1",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            "--log-bin=binlog",
            "--sync-binlog=0",
            "--innodb-buffer-pool-size=64M",
            "--innodb-redo-log-capacity=32M",
            "--plugin-load-add=group_replication.so",
            *(f"--loose-group-replication-{name}={value}" for name, value in group.items()),
        ]

    def copy_data(self, source: Path) -> None:
        """Begin with the data of a server that was never started: that is quicker than its own."""
        data = self._folder / "data"
        shutil.copytree(source, data)
        (data / "auto.cnf").unlink(missing_ok=True)  # has the server's id
        for path in (data, *data.rglob("*")):
            shutil.chown(path, self._folder.owner())

    def start(self, *, first: bool = False) -> None:
        """Start it, and wait until it is a member; the `first` one begins the group.

        Raises:
            CannotStartError: it ended, or is no member in time.
        """
        super().start()
        # Members copy what they have missed from each other, as root.
        channel = "FOR CHANNEL 'group_replication_recovery'"
        source = f"CHANGE REPLICATION SOURCE TO SOURCE_USER = 'root' {channel}"
        bootstrap = "SET GLOBAL group_replication_bootstrap_group = {}"
        begin = [bootstrap.format("ON")] if first else []

        def joins() -> bool:
            if self._state()[0] not in {"ONLINE", "RECOVERING"}:
                # Refused while the group has not noticed the end of its predecessor.
                self.execute(source, *begin, "START GROUP_REPLICATION", timeout=nodes.TIMEOUT)
            return True

        self.wait_until(joins, "does not join its group")
        if first:
            self.execute(bootstrap.format("OFF"))
        self.wait_until(lambda: self._state()[0] == "ONLINE", "is no member of its group")

    def _state(self) -> tuple[str, str]:
        """Its state and its role, as it sees them.

        Raises:
            pymysql.Error: it does not answer.
        """
        [(state, role)] = self.execute(
            "SELECT member_state, member_role FROM performance_schema.replication_group_members "
            "WHERE member_id = @@server_uuid"
        ) or [("", "")]
        return str(state), str(role)

    def is_primary(self) -> bool:
        """Whether it is the member that takes writes; not while it does not answer."""
        try:
            return self._state() == ("ONLINE", "PRIMARY")
        except pymysql.Error:
            return False


class Group:
    """Members, of which one is the primary."""

    def __init__(self, members: list[Node]) -> None:
        """The first of `members` is the primary."""
        self.members = members
        self.primary = members[0]

    def find_primary(self) -> None:
        """Wait until a member is the primary that takes writes: `primary`.

        Raises:
            CannotStartError: there is none in time.
        """
        running = [member for member in self.members if member.runs]

        def has_primary() -> bool:
            primaries = [member for member in running if member.is_primary()]
            self.primary = (primaries or [self.primary])[0]
            return bool(primaries)

        running[0].wait_until(has_primary, "has no primary")
        nodes.wait_until_writable(self.primary)

    def switch(self, member: Node) -> None:
        """Make `member` the primary in order; transactions that still run then are ended.

        Raises:
            pymysql.Error: it was refused.
        """
        [(uuid,)] = member.execute("SELECT @@server_uuid")
        self.primary.execute(
            f"SELECT group_replication_set_as_primary('{uuid}', {RUNNING})", timeout=SWITCH_TIMEOUT
        )
        self.find_primary()


@contextmanager
def group(size: int = 3) -> Iterator[Group]:
    """A group of `size` members, all started.

    Raises:
        CannotStartError: a member does not start, or there is no MySQL and none can be downloaded.
    """
    with ExitStack() as stack:
        folder, become = stack.enter_context(folder_of("mysql"))
        ports = free_ports(2 * size)
        members: list[Node] = []
        for number in range(size):
            place = folder / f"node{number}"
            place.mkdir()
            shutil.chown(place, folder.owner())
            members.append(Node(place, become, ports[2 * number : 2 * number + 2]))
        first, *rest = members
        install_mysql(folder / "node0", become)
        for node in rest:
            node.copy_data(folder / "node0" / "data")
        for number, node in enumerate(members):
            node.configure(number, members)
            stack.callback(node.crash)
            node.start(first=node is first)
        first.execute(*PROBES)
        yield Group(members)
