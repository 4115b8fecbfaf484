"""The table of a subscriber's options in docs/subscribers.md, from the docstrings in the code.

python -m tools.options [--check]
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "faststream_sqlbroker" / "subscriber" / "options.py"
PAGE = ROOT / "docs" / "subscribers.md"
BEGIN, END = "<!-- options -->\n", "<!-- /options -->"


def table() -> str:
    """Markdown: one row for each attribute of `SubscriberOptions` and the docstring below it."""
    tree = ast.parse(SOURCE.read_text())
    options = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SubscriberOptions")
    rows, name = [], ""
    for node in options.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            rows.append(f"| `{name}` | {' '.join(str(node.value.value).split())} |")
            name = ""
    return "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


def updated(text: str) -> str:
    """`text` with today's table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    text = PAGE.read_text()
    if updated(text) == text:
        sys.exit(0)
    if "--check" in sys.argv:
        sys.exit("docs/subscribers.md differs from the options in the code: run `just generate`")
    PAGE.write_text(updated(text))
