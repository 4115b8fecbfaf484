"""PostgreSQL under Patroni with etcd, behind HAProxy: which of two servers takes writes is
Patroni's to decide."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from sqlalchemy.engine import URL

from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.failover import failover
from tests.faults.failover.pairs import DRIVER, HOSTS, PairTopology, crowd, fall_behind, lag
from tests.faults.failover.topology import Topology, Way
from tests.faults.faults.fault import some_work
from tests.faults.history import History, Loss, Takeover
from tools.pair import USER
from tools.patroni import Patroni, patroni

HAPROXY, PSYCOPG = "HAProxy", f"{HOSTS}, psycopg"


class PatroniTopology(PairTopology):
    """A pair that Patroni keeps; all ways find the primary by themselves."""

    pair: Patroni

    def __init__(self, servers: Patroni) -> None:
        """`servers` run, and Patroni is paused."""
        super().__init__(servers)

    @property
    def version(self) -> str:
        """Of the servers and of Patroni."""
        patroni_version = self.pair.primary.status()["patroni"]["version"]
        return f"{super().version}, Patroni {patroni_version}"

    async def open(self, stack: AsyncExitStack) -> None:
        """Make the URLs."""
        hosts = {
            "host": tuple(f"127.0.0.1:{node.port}" for node in self.pair.nodes),
            "target_session_attrs": "read-write",
        }
        by_name = URL.create(DRIVER, USER, database="postgres", query=hosts)
        by_psycopg = by_name.set(drivername="postgresql+psycopg").update_query_dict(
            {"connect_timeout": "3"}
        )
        through = URL.create(
            DRIVER, USER, host="127.0.0.1", port=self.pair.haproxy_port, database="postgres"
        )
        urls = {HOSTS: by_name, PSYCOPG: by_psycopg, HAPROXY: through}
        self.ways = {name: Way(url.render_as_string()) for name, url in urls.items()}
        self.straight = self.ways[HOSTS].url

    async def lead_to_new(self) -> None:
        """Wait for the new primary and for HAProxy."""
        await asyncio.to_thread(self.pair.wait_until_led)

    @asynccontextmanager
    async def striking(self, cell: FailoverCell, *, lossy: bool) -> AsyncIterator[None]:
        """Inside of it Patroni decides, which takes one takeover for granted. A machine that stands
        still may bring about more: they are noted."""
        began = time.monotonic()
        before = self.pair.timeline
        await cell.do(partial(self.pair.pause, on=False))
        await self.prepare()
        yield
        await self.prepare()
        await cell.do(partial(self.pair.pause, on=True))
        await self.lead_to_new()
        note_others(cell.history, self.pair.timeline - before - 1, began, lossy=lossy)


def note_others(history: History, takeovers: int, began: float, *, lossy: bool) -> None:
    """Note `takeovers` that came unasked since `began`. `lossy`: what was committed since may be
    lost by each of them."""
    if takeovers > 0:
        ended = time.monotonic()
        history.takeovers.append(Takeover(began, ended))
        if lossy:
            history.losses.append(Loss(began, began, ended))


@contextmanager
def servers(*, synchronous: bool = False) -> Iterator[Topology]:
    """A pair that Patroni keeps."""
    with patroni(synchronous=synchronous) as made:
        yield PatroniTopology(made)


@failover(
    "Patroni: primary killed",
    topology=servers,
    lossy=True,
    ways=(HOSTS, PSYCOPG, HAPROXY),
    published=(HOSTS, HAPROXY),
)
async def killed(cell: FailoverCell, there: PatroniTopology) -> None:
    """The primary is killed with its Patroni, after its changes have not been sent for 0.3 to 2 s.
    The other takes over when the lock has run out, and the old one is rewound while the work goes
    on."""
    async with there.striking(cell, lossy=True), cell.loaded():
        await crowd(cell)
        since = await fall_behind(cell, there)
        await lag(cell, since)
        async with cell.takeover(since):
            await cell.do(there.pair.primary.kill)
        await cell.do(there.pair.rejoin)


@failover(
    "Patroni: planned switchover, synchronous",
    topology=partial(servers, synchronous=True),
    ways=(HOSTS, PSYCOPG, HAPROXY),
    published=(HOSTS, HAPROXY),
)
async def switchover(cell: FailoverCell, there: PatroniTopology) -> None:
    """Patroni is asked for it, and lets the old primary follow while the work goes on."""
    async with there.striking(cell, lossy=False), cell.loaded():
        await some_work(cell)
        async with cell.takeover():
            await cell.do(there.pair.switch_over)
        await there.prepare()
