"""Which code a result was measured with."""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASURED = ("faststream_sqlbroker", "pyspark_sqlbroker", "benchmarks")
SHOWING = ("report.py", "charts.py", "quotes.py")
"""Files of benchmarks that only show what is kept."""


def code(root: Path = ROOT) -> str:
    """Changes with each line of the product and of the benchmarks, but not with a page of docs."""
    made = hashlib.sha256()
    files = (file for folder in MEASURED for file in (root / folder).rglob("*.py"))
    for path in sorted(files):
        if path.parent.name != "benchmarks" or path.name not in SHOWING:
            made.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return made.hexdigest()[:12]


def commit(root: Path = ROOT) -> str:
    """The commit, and whether the measured files differ from it; "unknown" without git."""
    try:
        name = _git(root, "rev-parse", "--short=8", "HEAD")
        files = [f"{folder}/**/*.py" for folder in MEASURED]
        changed = _git(root, "status", "--porcelain", "--", *(f":(glob){file}" for file in files))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
