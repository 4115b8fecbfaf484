"""Failovers under Patroni: what is noted when a machine that stands still brings about more of
them. `just test-failover` runs them."""

from typing import cast

import pytest

from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.patroni import PatroniTopology
from tests.faults.history import History
from tools.patroni import Patroni


class Servers:
    """What a topology needs of a pair; `timeline` rises with each takeover."""

    runs = True

    def __init__(self) -> None:
        self.nodes = ()
        self.primary = self.standby = self
        self.timeline = 1
        self.paused = True

    def pause(self, *, on: bool) -> None:
        self.paused = on

    def follow(self) -> None:
        pass

    def wait_until_led(self) -> None:
        pass


class Machine:
    """What it needs of a cell."""

    def __init__(self) -> None:
        self.history = History()

    do = FailoverCell.do


@pytest.mark.parametrize(
    ("takeovers", "lossy", "noted", "losses"),
    [(1, True, 0, 0), (3, True, 1, 1), (3, False, 1, 0), (0, True, 0, 0)],
)
async def test_takeovers_that_came_unasked_are_noted(
    takeovers: int, noted: int, losses: int, *, lossy: bool
) -> None:
    servers, machine = Servers(), Machine()
    there = PatroniTopology(cast("Patroni", servers))
    async with there.striking(cast("FailoverCell", machine), lossy=lossy):
        assert not servers.paused
        servers.timeline += takeovers
    assert servers.paused
    assert len(machine.history.takeovers) == noted
    assert len(machine.history.losses) == losses
