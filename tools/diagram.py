"""ARCHITECTURE.md's diagrams of states, of messages and of outcomes, from the transitions in the
code.

python -m tools.diagram [--check]
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from faststream_sqlbroker.core import states
from faststream_sqlbroker.flow import outcome_states
from tools.files import update_block

FILE = Path(__file__).parent.parent / "ARCHITECTURE.md"


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


def _mermaid(arrows: Iterable[tuple[str | None, str, str]]) -> str:
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {source or '[*]'} --> {target}: {event}" for source, event, target in arrows]
    return "\n".join([*lines, "```", ""])


BLOCKS = {"states": diagram, "outcomes": outcomes}
"""Name of the block in `FILE`, and what makes it."""


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(max([update_block(FILE, name, make(), check=check) for name, make in BLOCKS.items()]))
