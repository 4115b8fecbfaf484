"""An export, as a process of its own, that is killed with its Java at a step of the first replacement.

    python -m tests.spark.dying_export URL PATH STEP

It ends itself by SIGKILL with its whole group: start it in a new one.
"""

import os
import signal
import sys
from typing import Any

from faststream_sqlbroker.spark import build_session, export_archive
from faststream_sqlbroker.spark.folders import Folders
from faststream_sqlbroker.spark.lake import Lake

STEPS: dict[str, tuple[Any, str, int]] = {
    "it is noted": (Lake, "_swap", 1),
    "between the renames": (Folders, "move", 2),
    "before it is recorded": (Lake, "_record", 1),
}
"""Which call of which method is never made."""

CONFIG = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def die_at(step: str) -> None:
    """Let the process be killed where that call would be made."""
    owner, name, number = STEPS[step]
    original, calls = getattr(owner, name), list[str]()

    def call(*given: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        return original(*given)

    setattr(owner, name, call)


def main(url: str, path: str, step: str) -> None:
    """Export the day again that is there."""
    spark = build_session("dying", databases=["sqlite"], master="local[1]", config=CONFIG)
    die_at(step)
    export_archive(spark, url, path, since="2026-03-07", until="2026-03-08", verify="counts")


if __name__ == "__main__":
    main(*sys.argv[1:])
