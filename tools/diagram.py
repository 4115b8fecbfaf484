"""The diagrams of states of messages and outcomes, and of the modes of claims, from the transitions
in the code.

python -m tools.diagram [--check]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from faststream_sqlbroker.core import states
from faststream_sqlbroker.flow.deliver import claim, outcome_states, ready
from tools.files import update_block

ROOT = Path(__file__).parent.parent
INTERNALS = ROOT / "INTERNALS.md"
FETCHING = ROOT / "docs" / "explanation" / "fetching.md"


def diagram() -> str:
    """Mermaid text of a message's states."""
    return _mermaid(
        (source and source.name, event, target.name) for source, event, target in states.TRANSITIONS
    )


def outcomes() -> str:
    """Mermaid text of an outcome's states."""
    return _mermaid(
        (source and source.name, event.value, target.name)
        for source, event, target in outcome_states.TRANSITIONS
    )


def modes() -> str:
    """Mermaid text of what a subscriber's next claim does."""
    begin = (None, "start", ready.Mode.START.name)
    moves = [(a.name, event.value, b.name) for a, event, b in ready.TRANSITIONS]
    return _mermaid([begin, *moves])


def modes_table() -> str:
    """What each mode means."""
    lines = ["| mode | the next claim |", "|---|---|"]
    lines += [f"| {mode.name} | {mode.value} |" for mode in ready.Mode]
    return "\n".join([*lines, ""])


def found_table() -> str:
    """What a claim may find."""
    lines = ["| found | meaning |", "|---|---|"]
    lines += [f"| {found.name} | {found.value} |" for found in claim.ClaimYield]
    return "\n".join([*lines, ""])


def _mermaid(arrows: Iterable[tuple[str | None, str, str]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source or '[*]'} --> {target}: {event}" for source, event, target in arrows]
    return "\n".join([*lines, "```", ""])


BLOCKS = {
    "states": (INTERNALS, diagram),
    "outcomes": (INTERNALS, outcomes),
    "modes": (FETCHING, modes),
    "modes-table": (FETCHING, modes_table),
    "found-table": (FETCHING, found_table),
}
"""Name of each block: its file, and what makes it."""


if __name__ == "__main__":
    check = "--check" in sys.argv
    results = [
        update_block(file, name, make(), check=check) for name, (file, make) in BLOCKS.items()
    ]
    sys.exit(max(results))
