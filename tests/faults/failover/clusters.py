"""Clusters of MariaDB or MySQL servers, each of which is reached by a proxy."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack

from sqlalchemy.engine import URL

from tests.faults.failover.topology import Topology, Way
from tests.proxy import Proxy
from tools.nodes import Node, follow

STRAIGHT = "straight"
DATABASE = "app"
OPTIONS = {"release_stuck_timeout": 12.0}
"""Of workers: it takes the other servers 6 or 7 seconds to go on without one that is killed."""


class ClusterTopology(Topology):
    """Servers that replicate to each other, and a proxy for each way."""

    first_statement: str | None = None
    """Of each session of the machine itself."""

    def __init__(self, nodes: Sequence[Node], driver: str, names: Collection[str]) -> None:
        """`nodes` run, the first takes writes; `names` are those of the ways."""
        self.nodes = nodes
        self._driver = driver
        self._names = (STRAIGHT, *names)
        self._proxies: dict[str, Proxy] = {}
        self._targets: dict[str, Node] = dict.fromkeys(self._names, nodes[0])

    @property
    def version(self) -> str:
        """Of the servers."""
        running = next(node for node in self.nodes if node.runs)
        [(version,)] = running.execute("SELECT version()")
        product = {"mariadb": "MariaDB", "mysql": "MySQL"}[self.kind]
        return f"{product} {str(version).split('-', maxsplit=1)[0]}"

    async def open(self, stack: AsyncExitStack) -> None:
        """Make the database, and start the proxies."""
        await asyncio.to_thread(self.nodes[0].execute, f"CREATE DATABASE {DATABASE}")
        for name in self._names:
            proxy = self._proxies[name] = Proxy("127.0.0.1", 0, postgresql=False)
            await self.lead(name, self._targets[name])
            stack.push_async_callback(proxy.stop)
        self.ways = {name: Way(self._url(name)) for name in self._names[1:]}
        self.straight = self._url(STRAIGHT, self.first_statement)

    def _url(self, name: str, first_statement: str | None = None) -> str:
        query = {} if first_statement is None else {"init_command": first_statement}
        port = self._proxies[name].port
        url = URL.create(self._driver, "root", None, "127.0.0.1", port, DATABASE, query)
        return url.render_as_string()

    async def lead(self, name: str, node: Node, *, keep: bool = False) -> None:
        """Let the way `name` lead to `node`; `keep` the sessions that it has already."""
        self._targets[name] = node
        proxy = self._proxies[name]
        proxy.lead_to(node.port)
        if not keep:
            await proxy.stop()
            await proxy.start()

    async def join_all(self, writer: Node) -> None:
        """Let nodes that have ended join again, and wait until all follow `writer`."""
        for node in self.nodes:
            if not node.runs:
                await asyncio.to_thread(node.start)
        followers = [node for node in self.nodes if node is not writer]
        await asyncio.to_thread(follow, writer, followers)
