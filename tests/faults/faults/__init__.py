"""The faults: each is one disturbance of a cell, at a random moment, over when it returns."""

from tests.faults.faults import (
    answers,
    connections,
    processes,
    rows,
    servers,
    soak,
    transactions,
)
from tests.faults.faults.fault import ENTERED, EVERYWHERE, SERVERS, Fault

FAULTS: dict[str, Fault] = {
    name: fault
    for module in (processes, connections, servers, rows, answers, transactions, soak)
    for name, fault in ENTERED.items()
    if fault.disturb.__module__ == module.__name__
}
"""All of them, in the order of the document."""

__all__ = ("EVERYWHERE", "FAULTS", "SERVERS", "Fault")
