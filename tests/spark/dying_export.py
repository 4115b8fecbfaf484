"""An export, as a process of its own, that is killed with its Java in the middle of the first
replacement.

    python -m tests.spark.dying_export URL PATH

It ends itself by SIGKILL with its whole group: start it in a new one.
"""

import os
import signal
import sys
from typing import Any

from faststream_sqlbroker.spark import build_session, export_archive
from faststream_sqlbroker.spark.lake.folders import Folders

OWNER = Folders
NAME = "move"
NUMBER = 2
"""Which call of which method is never made: that between the renames. Of every other step tests of
the lake die."""


def die() -> None:
    """Let the process be killed where that call would be made."""
    original = getattr(OWNER, NAME)
    calls = list[str]()

    def call(*given: Any) -> Any:
        calls.append(NAME)
        if len(calls) == NUMBER:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        return original(*given)

    setattr(OWNER, NAME, call)


def main(url: str, path: str) -> None:
    """Export the day again that is there."""
    spark = build_session(
        "dying", databases=["sqlite"], master="local[1]", config={"spark.driver.memory": "512m"}
    )
    die()
    export_archive(spark, url, path, since="2026-03-07", until="2026-03-08", verify="counts")


if __name__ == "__main__":
    main(*sys.argv[1:])
