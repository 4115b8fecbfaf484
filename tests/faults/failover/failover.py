"""The class of a failover, and the list of those that are entered."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.faults.cell import QUEUES
from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.topology import Topology

Strike = Callable[[FailoverCell, Any], Awaitable[None]]
"""Makes one server take the place of another; called with the cell and its topology."""


@dataclass(frozen=True, kw_only=True)
class Failover:
    """How servers are set up, and how one takes the place of another."""

    name: str
    strike: Strike
    topology: Callable[[], AbstractContextManager[Topology]]
    ways: tuple[str, ...]
    """Of the workers: one each."""
    published: tuple[str, ...]
    """Of the application, which takes them in turn."""
    lossy: bool = False
    """Whether the servers may lose commits."""
    short: bool = False
    """Whether CI has time for it."""
    queues: tuple[str, ...] = QUEUES
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the workers."""


ENTERED: dict[str, Failover] = {}


def failover(name: str, **how: Any) -> Callable[[Strike], Strike]:
    """Enter a function into `ENTERED`; `how` is what `Failover` takes."""

    def enter(strike: Strike) -> Strike:
        ENTERED[name] = Failover(name=name, strike=strike, **how)
        return strike

    return enter
