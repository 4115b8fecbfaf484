"""Faults of what handlers send with their acks: refused by a constraint, too large, waiting for
another transaction."""

from faststream_sqlbroker.core.rows import NewMessage
from tests.faults import plan
from tests.faults.cell import Cell
from tests.faults.faults.fault import SERVERS, fault
from tests.helpers import MYSQL
from tests.proxy import Proxy

PACKET = 1_048_576
"""Bytes that a server takes in one statement: far less than a server's default, so that tests stay
quick."""


@fault(
    "answers that the database refuses",
    short=(),
    queues=("batch", "batch", "plain", "tx", "ordered"),
    options={"refusing": True},
)
async def refused(cell: Cell, _proxy: Proxy | None) -> None:
    """A constraint of the user's; the attempt fails, and for a batch all of it."""
    await cell.publish(10)


async def small_packets(cell: Cell) -> None:
    """For all connections that are made from now on."""
    await cell.execute(f"SET GLOBAL max_allowed_packet = {PACKET}")
    await cell.engine.dispose()


@fault(
    "answers larger than the server takes",
    short=(),
    databases=MYSQL,
    own_server=True,
    prepare=small_packets,
    queues=("plain", "plain", "batch", "tx"),
    options={"large": PACKET},
)
async def too_large(cell: Cell, _proxy: Proxy | None) -> None:
    """Alone, or together with others in one statement."""
    await cell.goes_on("while others had answers that are too large for the server", "plain")


async def hold_dedup_id(cell: Cell) -> None:
    """Before any answer has it: a transaction that meets a duplicate keeps the gap before it locked
    on InnoDB."""
    cell.theirs = await cell.kept.enter_async_context(cell.engine.connect())
    same = NewMessage("out", b"", '{"numbers": []}', dedup_id=plan.SAME)
    await cell.store.insert_in(cell.theirs, [same])


@fault(
    "an answer's dedup_id held by another transaction",
    short=(),
    databases=SERVERS,
    prepare=hold_dedup_id,
    # Each try has its rows locked for as long as it waits, so that their leases may not be renewed
    # in time: a wait is a fraction of a lease, as it is with the defaults.
    keeps_from_renewing=True,
    options={
        "statement_timeout": 1.0,
        "release_stuck_timeout": 8.0,
        "slow": 2.0,
        # Five tries of each refused answer, between those that wait, would take longer than the
        # cell does.
        "refusing": False,
    },
)
async def dedup_held(cell: Cell, _proxy: Proxy | None) -> None:
    """An application's, which is open for long, and is rolled back in the end."""
    while not plan.dedups(cell.number + 1):
        cell.number += 1
    await cell.publish_to("plain")
    await cell.goes_on("while answers waited for another transaction", "plain")
    assert cell.theirs is not None
    await cell.theirs.rollback()
