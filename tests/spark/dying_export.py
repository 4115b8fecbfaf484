"""An export, as a process of its own, that is killed with its Java at one step of a commit.

    python -m tests.spark.dying_export URL PATH STEP

It ends itself by SIGKILL with its whole group: start it in a new one.
"""

import os
import signal
import sys
from typing import Any

from deltalake import DeltaTable

from faststream_sqlbroker.spark import build_session, export_archive
from faststream_sqlbroker.spark.lake.delta import DeltaWriter
from faststream_sqlbroker.spark.lake.records import Records

STEPS: dict[str, tuple[Any, str, bool]] = {
    "before staging": (DeltaWriter, "stage", False),
    "after staging": (DeltaWriter, "stage", True),
    "before the commit": (DeltaTable, "create_write_transaction", False),
    "after the commit": (DeltaTable, "create_write_transaction", True),
    "after the record": (Records, "write", True),
}
"""Where it is killed: before or after the first call of a method."""


def die(step: str) -> None:
    """Let the process be killed there."""
    owner, name, after = STEPS[step]
    original = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        if after:
            original(*given, **options)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    setattr(owner, name, call)


def main(url: str, path: str, step: str) -> None:
    """Export what is closed, and look again at all there is."""
    kind = url.partition(":")[0].partition("+")[0]
    spark = build_session(
        "dying",
        databases=["mysql" if kind == "mariadb" else kind],
        master="local[1]",
        config={"spark.driver.memory": "512m"},
    )
    die(step)
    export_archive(spark, url, path, since="2026-01-01", safety_lag=0, record_as="shop")


if __name__ == "__main__":
    main(*sys.argv[1:])
