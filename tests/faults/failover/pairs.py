"""PostgreSQL: a standby takes the place of its primary."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from sqlalchemy.engine import URL

from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.failover import failover
from tests.faults.failover.topology import Topology, Way
from tests.faults.faults.fault import some_work
from tests.faults.faults.processes import libfaketime
from tests.faults.plan import slow
from tests.proxy import Proxy
from tools.pair import USER, Node, Pair, pair
from tools.private import PgBouncer, bouncer

LAG = (0.3, 2.0)
"""Seconds that the standby is behind when the primary ends."""
UNTIL_PROMOTED = (0.0, 1.5)
"""Seconds from the end of the primary to the promotion."""
APART = (2.0, 4.0)
"""Seconds for which both servers take writes."""
BEHIND = -30
"""Seconds by which the clock of the second server differs."""
BURNT = 3000
"""Transactions of others on the new primary: they get numbers that the old one had given."""
HOSTS, PROXY, PINNED = "both servers by name", "proxy", "proxy that learns of it last"
BOUNCER, LISTENING = "PgBouncer", "PgBouncer, LISTEN past it"
TRIES = 10
"""How often a failover is begun that needs a moment which a busy machine may miss."""
CROWD = 10
"""Slow transactions: some have a lease and wait for a worker."""


class PairTopology(Topology):
    """A pair of PostgreSQL servers, and proxies before it."""

    kind = "postgresql"

    def __init__(self, servers: Pair, pooler: PgBouncer | None = None) -> None:
        """`servers` run; `pooler` leads to their primary."""
        self.pair = servers
        self._pooler = pooler
        self.proxies: dict[str, Proxy] = {}

    @property
    def version(self) -> str:
        """Of the servers."""
        [(number,)] = self.pair.primary.execute("SHOW server_version")
        return f"PostgreSQL {str(number).split(' ', maxsplit=1)[0]}"

    async def open(self, stack: AsyncExitStack) -> None:
        """Start the proxies."""
        ports = [str(node.port) for node in self.pair.nodes]
        for name in ("straight", PROXY, PINNED):
            proxy = self.proxies[name] = Proxy("127.0.0.1", self.pair.primary.port)
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        hosts = {
            "host": tuple(f"127.0.0.1:{port}" for port in ports),
            "target_session_attrs": "read-write",
        }
        by_name = URL.create(DRIVER, USER, database="postgres", query=hosts)
        ways: dict[str, Way] = {HOSTS: Way(by_name.render_as_string())}
        for name in (PROXY, PINNED):
            ways[name] = Way(_url(self.proxies[name].port))
        if self._pooler is not None:
            through = _url(self._pooler.port)
            ways[BOUNCER] = Way(through, {"pgbouncer": True})
            listen_url = ways[HOSTS].url
            ways[LISTENING] = Way(through, {"pgbouncer": True, "listen_url": listen_url})
        self.ways: Mapping[str, Way] = ways
        self.straight = _url(self.proxies["straight"].port)

    async def prepare(self) -> None:
        """Bring the old primary back, if it has ended."""
        if not self.pair.standby.runs:
            await asyncio.to_thread(self.pair.rejoin)
        await asyncio.to_thread(self.pair.follow)

    async def lead_to_new(self) -> None:
        """New connections of all ways: the old ones ended with the old primary."""
        primary = self.pair.primary
        for proxy in self.proxies.values():
            proxy.lead_to(primary.port)
        if self._pooler is not None:
            self._pooler.lead_to("127.0.0.1", primary.port, USER)


DRIVER = "postgresql+asyncpg"


def _url(port: int) -> str:
    return f"{DRIVER}://{USER}@127.0.0.1:{port}/postgres"


@contextmanager
def servers(*, synchronous: bool = False, behind: bool = False) -> Iterator[Topology]:
    """A pair; with `behind`, the clock of the second server is behind."""
    env = {}
    if behind:
        env = {
            "LD_PRELOAD": libfaketime(),
            "FAKETIME": f"{BEHIND:+d}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
    with pair(synchronous=synchronous, second_env=env) as made:
        yield PairTopology(made)


@contextmanager
def pooled_servers() -> Iterator[Topology]:
    """A synchronous pair behind a PgBouncer."""
    with (
        pair(synchronous=True) as made,
        bouncer("127.0.0.1", made.primary.port, USER) as pooler,
    ):
        yield PairTopology(made, pooler)


async def take_over(
    cell: FailoverCell, there: PairTopology, end: Callable[[], None], since: float | None = None
) -> None:
    """The primary ends by `end`, and the standby is promoted; what was committed after `since` may
    be lost: the new primary gives the numbers of those transactions to others."""
    async with cell.takeover(since):
        await cell.do(end)
        await asyncio.sleep(cell.draw.uniform(*UNTIL_PROMOTED))
        await cell.do(there.pair.promote)
        if since is not None:
            await cell.do(burn, there.pair.primary)


async def fall_behind(cell: FailoverCell, there: PairTopology) -> float:
    """The standby gets nothing any more: a moment before which it had everything."""
    since = time.monotonic()
    await there.prepare()
    await cell.do(there.pair.hold)
    return since


async def crowd(cell: FailoverCell) -> None:
    """Slow transactions, more than the workers take: their leases reach the standby, and some
    handlers start when nothing does any more."""
    for _ in range(CROWD if "tx" in cell.queues else 0):
        cell.number += next(n for n in range(12) if slow(cell.number + n + 1))
        await cell.publish_to("tx")
    await some_work(cell)


def burn(node: Node) -> None:
    """Use numbers of transactions on `node`."""
    node.execute(
        "CREATE TABLE IF NOT EXISTS burnt (number int)",
        f"DO $$ BEGIN FOR n IN 1..{BURNT} LOOP INSERT INTO burnt VALUES (n); COMMIT; END LOOP; "
        "END $$",
    )


async def lag(cell: FailoverCell, since: float) -> bool:
    """Let the standby stay behind, until a transaction is open whose lease has reached it; whether
    there is one, if the cell has nothing else."""
    # Of transactions alone none would be open any more after the longest of these times.
    only_tx = set(cell.queues) == {"tx"}
    shortest = time.monotonic() + (LAG[0] if only_tx else cell.draw.uniform(*LAG))
    longest = time.monotonic() + LAG[1]
    while (now := time.monotonic()) < longest:
        if now > shortest and any(
            d.claimed < since < d.at and d.ended is None for d in cell.deliveries("tx")
        ):
            return True
        await asyncio.sleep(0.05)
    return not only_tx


@asynccontextmanager
async def at_work(cell: FailoverCell, there: PairTopology) -> AsyncIterator[None]:
    """The standby follows, the application publishes, and the workers have some work."""
    await there.prepare()
    async with cell.loaded():
        await some_work(cell)
        yield


@failover(
    "asynchronous standby, behind",
    topology=servers,
    lossy=True,
    ways=(HOSTS, PROXY),
    published=(HOSTS, PROXY),
    short=True,
)
async def asynchronous(cell: FailoverCell, there: PairTopology) -> None:
    """The primary is killed after its changes have not been sent for 0.3 to 2 s."""
    await there.prepare()
    async with cell.loaded():
        for _ in range(TRIES):
            await crowd(cell)
            since = await fall_behind(cell, there)
            if await lag(cell, since):
                break
            await cell.do(there.pair.release)  # a busy machine was too slow
        await take_over(cell, there, there.pair.primary.kill, since)


@failover(
    "synchronous standby (remote_apply)",
    topology=partial(servers, synchronous=True),
    ways=(HOSTS, PROXY),
    published=(HOSTS, PROXY),
    short=True,
)
async def synchronous(cell: FailoverCell, there: PairTopology) -> None:
    """The primary is killed; each COMMIT has waited until the standby had shown it."""
    async with at_work(cell, there):
        await take_over(cell, there, there.pair.primary.kill)


@failover(
    "planned switchover",
    topology=servers,
    ways=(HOSTS, PROXY),
    published=(HOSTS, PROXY),
    short=True,
)
async def switchover(cell: FailoverCell, there: PairTopology) -> None:
    """The primary ends in order. For a while the proxy leads to the standby, which takes no writes:
    a worker that starts then is not ready."""
    async with at_work(cell, there):
        async with cell.takeover():
            await cell.do(there.pair.primary.stop)
            there.proxies[PROXY].lead_to(there.pair.standby.port)
            await cell.read_only(PROXY)
            await cell.do(there.pair.promote)
        await cell.end_newcomers()


@failover(
    "split brain for some seconds",
    topology=servers,
    lossy=True,
    ways=(HOSTS, PINNED),
    published=(HOSTS, PINNED),
)
async def split_brain(cell: FailoverCell, there: PairTopology) -> None:
    """The standby is promoted while the primary lives, and both take writes."""
    async with at_work(cell, there):
        since = await fall_behind(cell, there)
        async with cell.takeover(since):
            await cell.do(there.pair.promote)
            await asyncio.sleep(cell.draw.uniform(*APART))
            await cell.do(there.pair.standby.kill)


@failover(
    "old primary back by pg_rewind, and primary again",
    topology=servers,
    lossy=True,
    ways=(HOSTS, PROXY),
    published=(HOSTS, PROXY),
)
async def back_again(cell: FailoverCell, there: PairTopology) -> None:
    """It is rewound and follows while the work goes on, and takes over in order."""
    async with at_work(cell, there):
        since = await fall_behind(cell, there)
        await asyncio.sleep(cell.draw.uniform(*LAG))
        await take_over(cell, there, there.pair.primary.kill, since)
        await cell.do(there.pair.rejoin)
        await take_over(cell, there, there.pair.primary.stop)


@failover(
    "PgBouncer led to another server",
    topology=pooled_servers,
    ways=(BOUNCER, LISTENING),
    published=(BOUNCER,),
)
async def pooled(cell: FailoverCell, there: PairTopology) -> None:
    """The primary of a synchronous standby is killed, or ends in order."""
    async with at_work(cell, there):
        primary = there.pair.primary
        end = cell.draw.choice((primary.kill, primary.stop))
        await take_over(cell, there, end)


@failover(
    "new primary's clock 30 s behind",
    topology=partial(servers, synchronous=True, behind=True),
    ways=(HOSTS, PROXY),
    published=(HOSTS, PROXY),
)
async def clock_behind(cell: FailoverCell, there: PairTopology) -> None:
    """The primary of a synchronous standby is killed, whose clock is behind."""
    async with at_work(cell, there):
        if there.pair.primary is not there.pair.nodes[0]:
            # The one with the right clock takes over first.
            await take_over(cell, there, there.pair.primary.stop)
            await there.prepare()
        await take_over(cell, there, there.pair.primary.kill)
