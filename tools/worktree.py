"""A revision of this repository in a folder of its own, for as long as it is needed."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


@contextmanager
def worktree(rev: str) -> Iterator[Path]:
    """The files of `rev` as a git worktree, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="sqlbroker-") as folder:
        path = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(path), rev)
        try:
            yield path
        finally:
            _git("worktree", "remove", "--force", str(path))


def _git(*command: str) -> None:
    subprocess.run(["git", *command], cwd=ROOT, check=True)
