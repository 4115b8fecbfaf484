"""`sqlbroker archive export`, killed as a process, with its Java, at one step of a commit.

    python -m tests.spark.dying_export URL PATH STEP [CALL]

It ends itself by SIGKILL with its whole group: start it in a new one.
"""

import os
import signal
import sys
from typing import Any

from deltalake import DeltaTable

from faststream_sqlbroker.cli import main as command
from pyspark_sqlbroker.lake.delta import DeltaWriter
from pyspark_sqlbroker.lake.records import WindowRecords
from tests.spark.lookups import remembered

ROWS_PER_COMMIT = 5
STEPS: dict[str, tuple[Any, str, bool]] = {
    "before staging": (DeltaWriter, "stage", False),
    "after staging": (DeltaWriter, "stage", True),
    "before the commit": (DeltaTable, "create_write_transaction", False),
    "after the commit": (DeltaTable, "create_write_transaction", True),
    "after the record": (WindowRecords, "write", True),
}
"""Where it is killed: before or after a call of a method."""


def die(step: str, number: int) -> None:
    """Let the process be killed there, at the call of this number."""
    owner, name, after = STEPS[step]
    original = getattr(owner, name)
    left = number

    def call(*given: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left or after:
            result = original(*given, **options)
        if left:
            return result
        os.killpg(os.getpgrp(), signal.SIGKILL)

    setattr(owner, name, call)


def main(url: str, path: str, step: str, number: str = "1") -> None:
    """Export what is closed, and look again at all there is, by the command."""
    die(step, int(number))
    os.environ["SQLBROKER_URL"] = url
    days = ["--since", "2026-01-01", "--safety-lag", "0s", "--record-as", "shop"]
    commits = ["--rows-per-commit", str(ROWS_PER_COMMIT), "--master", "local[1]"]
    sys.argv[1:] = ["archive", "export", "--path", path, *days, *commits]
    command()


if __name__ == "__main__":
    with remembered():
        main(*sys.argv[1:])
