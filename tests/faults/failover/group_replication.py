"""Group replication of MySQL: another member becomes the primary."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.clusters import OPTIONS, ClusterTopology
from tests.faults.failover.failover import failover
from tests.faults.failover.topology import Topology
from tests.faults.faults.fault import some_work
from tools.group_replication import Group, group

ENDING, KEEPING = "proxy that ends sessions", "proxy that keeps sessions"


class GroupTopology(ClusterTopology):
    """Three members, of which one takes writes."""

    kind = "mysql"

    def __init__(self, servers: Group) -> None:
        """`servers` run."""
        super().__init__(servers.members, "mysql+aiomysql", (ENDING, KEEPING))
        self.group = servers

    async def prepare(self) -> None:
        """Let members that have ended join again."""
        await self.join_all(self.group.primary)

    def end(self) -> None:
        """Kill the primary, and wait until another takes writes."""
        self.group.primary.crash()
        self.group.find_primary()

    async def lead_to_new(self) -> None:
        """All ways lead to the new primary; sessions of one of them stay where they are."""
        for name in self._targets:
            await self.lead(name, self.group.primary, keep=name == KEEPING)


@contextmanager
def servers() -> Iterator[Topology]:
    """A group of three."""
    with group(3) as made:
        yield GroupTopology(made)


@failover(
    "group replication, primary killed",
    topology=servers,
    ways=(ENDING, KEEPING),
    published=(ENDING,),
    options=OPTIONS,
)
async def killed(cell: FailoverCell, there: GroupTopology) -> None:
    """The primary is killed."""
    await there.prepare()
    async with cell.loaded():
        await some_work(cell)
        async with cell.takeover():
            await cell.do(there.end)


@failover(
    "group replication, planned switch",
    topology=servers,
    ways=(ENDING, KEEPING),
    # A pool of an application's own keeps its sessions to a server that takes no writes any more.
    published=(ENDING,),
    options=OPTIONS,
)
async def switched(cell: FailoverCell, there: GroupTopology) -> None:
    """Another member is made the primary in order; the old one stays, and takes no writes."""
    await there.prepare()
    async with cell.loaded():
        await some_work(cell)
        async with cell.takeover():
            members = [each for each in there.group.members if each is not there.group.primary]
            await cell.do(there.group.switch, cell.draw.choice(members))
