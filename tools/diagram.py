"""ARCHITECTURE.md's diagram of states, from the transitions in the code.

python -m tools.diagram [--check]
"""

import sys
from pathlib import Path

from faststream_sqlbroker.core.states import TRANSITIONS

FILE = Path(__file__).parent.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- states -->\n", "<!-- /states -->"


def diagram() -> str:
    """Mermaid text."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for source, event, target in TRANSITIONS:
        lines.append(f"    {source.name if source else '[*]'} --> {target.name}: {event}")
    return "\n".join([*lines, "```", ""])


def updated(text: str) -> str:
    """`text` with the diagram of today's transitions."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + diagram() + END + after


if __name__ == "__main__":
    text = FILE.read_text()
    if updated(text) == text:
        sys.exit(0)
    if "--check" in sys.argv:
        sys.exit("ARCHITECTURE.md's diagram differs from core/states.py: run `just diagram`")
    FILE.write_text(updated(text))
