"""Run the tests of a module, from the table of tests/MODULES.md.

python -m tools.module_tests flow/deliver/flush.py [PYTEST ARGUMENTS]

The module's path is below faststream_sqlbroker/, or begins with pyspark_sqlbroker/.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "MODULES.md"
PACKAGE = ROOT / "faststream_sqlbroker"
READERS = ROOT / "pyspark_sqlbroker"


def name_of(path: Path) -> str:
    """How the table calls a module of one of the packages."""
    return path.relative_to(ROOT).as_posix().removeprefix(f"{PACKAGE.name}/")


def modules(text: str) -> list[tuple[str, list[str]]]:
    """Each module of the table with its tests, in the table's order."""
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            _, named, tests, _ = line.split("|")
            found += [(name, _quoted(tests)) for name in _quoted(named)]
    return found


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def paths_of(path: str) -> list[str]:
    """The tests of one module, below the repository's root; empty if the table lacks it."""
    tests = dict(modules(TABLE.read_text())).get(name_of(ROOT / path), [])
    return [f"tests/{test}" for test in tests]


if __name__ == "__main__":
    if len(sys.argv) < 2 or not (tests := paths_of(sys.argv[1])):
        sys.exit(f"give a module of {TABLE.relative_to(ROOT)}, such as flow/deliver/flush.py")
    command = [sys.executable, "-m", "pytest", *tests, *sys.argv[2:]]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
