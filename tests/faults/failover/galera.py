"""Galera: a node is killed, of a cluster in which one takes writes, or all do."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial

from tests.faults.cell import QUEUES
from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.clusters import OPTIONS, ClusterTopology
from tests.faults.failover.failover import failover
from tests.faults.failover.topology import Topology
from tests.faults.faults.fault import some_work
from tests.faults.plan import LIMITED
from tools.galera import cluster
from tools.nodes import Node, wait_until_writable

PATIENCE = 5.0
"""Seconds until the others go on without a node that has ended."""
PROXY = "proxy"
NODES = ("node 1", "node 2", "node 3")


class GaleraTopology(ClusterTopology):
    """Three nodes, and ways to one of them or to each."""

    kind = "mariadb"
    # Else a node may show less than another has committed.
    first_statement = "SET SESSION wsrep_sync_wait = 15"

    def __init__(self, nodes: list[Node], *, several: bool) -> None:
        """`several`: whether each node takes writes."""
        super().__init__(nodes, "mariadb+aiomysql", NODES if several else (PROXY,))
        self._own = dict(zip(NODES, nodes, strict=True)) if several else {}
        self.writer = nodes[0]
        self.ids_rise = not several

    async def open(self, stack: AsyncExitStack) -> None:
        """With several writers, each way leads to its own."""
        self._targets |= self._own
        await super().open(stack)

    async def prepare(self) -> None:
        """Let nodes that have ended join again, each way leads to its own then."""
        await self.join_all(self.writer)
        for name, node in self._own.items():
            if self._targets[name] is not node:
                await self.lead(name, node)

    def end(self, node: Node) -> None:
        """Kill `node`, and wait until the others take writes."""
        node.crash()
        if node is self.writer:
            self.writer = next(each for each in self.nodes if each.runs)
        wait_until_writable(self.writer)

    async def lead_to_new(self) -> None:
        """Ways to the node that has ended lead to another."""
        for name, node in self._targets.items():
            if not node.runs:
                await self.lead(name, self.writer)


@contextmanager
def servers(*, several: bool = False) -> Iterator[Topology]:
    """A cluster of which one node takes writes, or with `several`, all do."""
    with cluster(3, patience=PATIENCE) as nodes:
        yield GaleraTopology([*nodes], several=several)


@failover(
    "Galera, one writer",
    topology=servers,
    ways=(PROXY, PROXY),
    published=(PROXY,),
    options=OPTIONS,
)
async def one_writer(cell: FailoverCell, there: GaleraTopology) -> None:
    """The node that takes writes is killed."""
    await there.prepare()
    async with cell.loaded():
        await some_work(cell)
        async with cell.takeover():
            await cell.do(there.end, there.writer)


@failover(
    "Galera, three writers",
    topology=partial(servers, several=True),
    ways=NODES,
    published=NODES,
    queues=(*QUEUES, *LIMITED),
    options=OPTIONS,
)
async def three_writers(cell: FailoverCell, there: GaleraTopology) -> None:
    """One of three nodes is killed, each of which has a worker."""
    await there.prepare()
    async with cell.loaded():
        await some_work(cell)
        async with cell.takeover():
            await cell.do(there.end, cell.draw.choice(there.nodes))
