"""The table of reasons in docs/howto/operating.md, from the code.

python -m tools.reasons [--check]
"""

import sys
from pathlib import Path

from faststream_sqlbroker.core.reasons import MEANINGS
from tools.files import update_block

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "operating.md"


def table() -> str:
    """Markdown: one row for each code."""
    rows = [f"| `{code}` | {m.states} | {m.text} | {m.related} |" for code, m in MEANINGS.items()]
    return (
        "\n".join(["| code | state | meaning | `related_id` |", "|---|---|---|---|", *rows]) + "\n"
    )


if __name__ == "__main__":
    sys.exit(update_block(PAGE, "reasons", table(), check="--check" in sys.argv))
