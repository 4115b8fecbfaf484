"""Failovers: servers that take each other's place while an application and workers go on.

A kind of cluster is a `Topology` in a module of its own, next to the functions that strike it; what
`failover` enters there is run by the tests and by `just test-failover`.
"""

from tests.faults.failover import galera, group_replication, pairs, patroni
from tests.faults.failover.failover import ENTERED, Failover

FAILOVERS: dict[str, Failover] = {
    name: one
    for module in (pairs, patroni, galera, group_replication)
    for name, one in ENTERED.items()
    if one.strike.__module__ == module.__name__
}
"""All of them, in the order of the document."""

__all__ = ("FAILOVERS", "Failover")
