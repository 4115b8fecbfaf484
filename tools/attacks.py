"""The table of attacks on HTTP, from the tests that are there.

A test marked `@pytest.mark.attack("what is tried", "what happens")` is a line of the table.

    python -m tools.attacks [--check]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.files import update_block

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "http"
PAGE = ROOT / "docs" / "howto" / "security.md"
NAME = "attacks"
Row = tuple[str, str, str]


def rows() -> list[Row]:
    """What is tried, what happens, and the test, in the order of the files."""
    return [row for path in sorted(TESTS.rglob("test_*.py")) for row in rows_of(path)]


def rows_of(path: Path) -> Iterator[Row]:
    """Those of one file.

    Raises:
        ValueError: a mark has not two texts.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.attack":
                texts = [ast.literal_eval(each) for each in mark.args]
                if [type(each) for each in texts] != [str, str]:
                    raise ValueError(f"{path.name}, {node.name}: an attack has two texts")
                yield texts[0], texts[1], f"`{path.relative_to(TESTS)}`: {node.name}"


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = ["| attack | what happens | test in `tests/http` |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(update_block(PAGE, NAME, table(rows()), check="--check" in sys.argv))
