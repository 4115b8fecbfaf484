"""The layout's rules that no linter knows: sizes, who may know FastStream's internals, clocks."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "faststream_sqlbroker"
FILES = sorted(PACKAGE.rglob("*.py"))
LINES, FUNCTION_LINES = 400, 40

INTERNALS = {
    "annotations.py", "message.py", "parser.py",
    "broker/broker.py", "broker/config.py", "broker/logging.py", "broker/publishing.py",
    "broker/registrator.py", "broker/router.py",
    "publisher/config.py", "publisher/producer.py", "publisher/specification.py", "publisher/usecase.py",
    "subscriber/calls.py", "subscriber/config.py", "subscriber/factory.py", "subscriber/options.py",
    "subscriber/specification.py", "subscriber/usecase.py",
}  # fmt: skip
"""Everything a broker must subclass is internal in FastStream 0.7; nothing below the shell is here."""

LAYERS = ("core", "schema", "dialects", "store", "flow", "publisher", "subscriber", "broker")
"""From the ground up."""

WALL_CLOCKS = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported(path: Path) -> set[str]:
    """Modules that are imported when `path` is, those for types left out."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_there_are_files() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_few_modules_know_the_internals_of_faststream(path: Path) -> None:
    internal = {m for m in imported(path) if m.startswith("faststream._internal")}
    assert not internal or name(path) in INTERNALS


@pytest.mark.parametrize("path", [p for p in FILES if name(p).split("/")[0] in LAYERS], ids=name)
def test_imports_point_down(path: Path) -> None:
    own = LAYERS.index(name(path).split("/")[0])
    above = LAYERS[own + 1 :]
    for module in imported(path):
        parts = module.split(".")
        if parts[0] == "faststream_sqlbroker" and len(parts) > 1:
            assert parts[1] not in above, f"{module} lies above"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nobody_reads_the_wall_clock(path: Path) -> None:
    """The database's clock decides; a process measures lengths of time only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in WALL_CLOCKS, f"line {node.lineno}"
