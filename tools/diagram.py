"""ARCHITECTURE.md's diagram of states, from the transitions in the code.

python -m tools.diagram [--check]
"""

import sys
from pathlib import Path

from faststream_sqlbroker.core.states import TRANSITIONS
from tools.files import update_block

FILE = Path(__file__).parent.parent / "ARCHITECTURE.md"


def diagram() -> str:
    """Mermaid text."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for source, event, target in TRANSITIONS:
        lines.append(f"    {source.name if source else '[*]'} --> {target.name}: {event}")
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    sys.exit(update_block(FILE, "states", diagram(), check="--check" in sys.argv))
