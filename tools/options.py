"""The table of a subscriber's options in docs/howto/subscribers.md, from the docstrings in the
code.

python -m tools.options [--check]
"""

import ast
import sys
from pathlib import Path

from tools.files import update_block

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "faststream_sqlbroker" / "subscriber" / "options.py"
PAGE = ROOT / "docs" / "howto" / "subscribers.md"


def table() -> str:
    """Markdown: one row for each attribute of `SubscriberOptions` and the docstring below it."""
    tree = ast.parse(SOURCE.read_text())
    options = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SubscriberOptions"
    )
    rows, name = [], ""
    for node in options.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            rows.append(f"| `{name}` | {' '.join(str(node.value.value).split())} |")
            name = ""
    return "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(update_block(PAGE, "options", table(), check="--check" in sys.argv))
