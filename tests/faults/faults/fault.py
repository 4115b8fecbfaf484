"""The class of a fault, and the list of all faults."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.cell import QUEUES, Cell
from tests.helpers import MYSQL
from tests.proxy import Proxy

SERVERS = ("postgresql", *MYSQL)
EVERYWHERE = (*SERVERS, "sqlite")
Disturb = Callable[[Cell, Proxy | None], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How a cell is set up and disturbed."""

    name: str
    disturb: Disturb
    databases: tuple[str, ...] = EVERYWHERE
    short: tuple[str, ...] = EVERYWHERE
    """Those of `databases` that the short pass has, too; each costs CI seconds."""
    proxied: bool = False
    """Whether the workers (and the publisher) go through a proxy."""
    keeps_from_renewing: bool = False
    """Whether it may keep any worker from renewing its leases, without being one of the other kinds
    that do."""
    own_server: bool = False
    """Whether it needs a server of its own, which it ends or changes."""
    small_disk: bool = False
    """Whether it needs a file system that it can fill."""
    login: bool = False
    """Whether the workers are a user who owns nothing."""
    prepare: Callable[[Cell], Awaitable[None]] | None = None
    """Done when the tables are there, before the workers start."""
    queues: tuple[str, ...] = QUEUES
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the workers."""
    load: float = 0.0
    """Seconds that it publishes and disturbs, and that `just test-faults` has time for once."""

    @property
    def disturbing(self) -> bool:
        """Whether it may keep any worker from renewing its leases."""
        return self.keeps_from_renewing or self.proxied or self.own_server or self.small_disk


ENTERED: dict[str, Fault] = {}


def fault(name: str, **how: Any) -> Callable[[Disturb], Disturb]:
    """Enter a function into `ENTERED`; `how` is what `Fault` takes."""

    def enter(disturb: Disturb) -> Disturb:
        ENTERED[name] = Fault(name=name, disturb=disturb, **how)
        return disturb

    return enter


async def some_work(cell: Cell) -> None:
    """Until a random number of handlers has started since."""
    wanted = cell.started() + cell.random.randint(1, 8)
    with contextlib.suppress(AssertionError):
        for _ in range(200):
            if cell.started() >= wanted:
                return
            await asyncio.sleep(0.01)
