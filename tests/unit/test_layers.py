"""The rules of the layout that no linter knows: imports, FastStream's internals, clocks."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "faststream_sqlbroker"
FILES = sorted(PACKAGE.rglob("*.py"))

INTERNALS = {
    "annotations.py",
    "parser.py",
    "broker/broker.py",
    "broker/config.py",
    "broker/logging.py",
    "broker/publishing.py",
    "broker/registrator.py",
    "broker/router.py",
    "publisher/config.py",
    "publisher/producer.py",
    "publisher/specification.py",
    "publisher/usecase.py",
    "subscriber/running_calls.py",
    "subscriber/config.py",
    "subscriber/factory.py",
    "subscriber/options.py",
    "subscriber/specification.py",
    "subscriber/usecase.py",
}
"""Everything a broker must subclass is internal in FastStream 0.7; nothing below the shell is here.
"""

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


def test_few_modules_know_the_internals_of_faststream() -> None:
    knowing = {
        name(path)
        for path in FILES
        if any(module.startswith("faststream._internal") for module in imported(path))
    }
    assert knowing == INTERNALS


def test_imports_point_down() -> None:
    upward, count = [], 0
    for path in FILES:
        layer = name(path).split("/")[0]
        if layer not in LAYERS:
            continue
        count += 1
        above = LAYERS[LAYERS.index(layer) + 1 :]
        for module in imported(path):
            parts = module.split(".")
            if parts[0] == "faststream_sqlbroker" and len(parts) > 1 and parts[1] in above:
                upward.append(f"{name(path)} imports {module}, which lies above")
    assert upward == []
    assert count > 40, "the package has moved"


def test_no_module_reads_the_wall_clock() -> None:
    """The database's clock decides; a process measures lengths of time only."""
    reading = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    ]
    assert reading == []
