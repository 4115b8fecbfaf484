"""PySpark's daemon, whose workers find imported what our tasks need.

And they do not read the directory of spark-core's jar again at every task: the jar is on the
workers' path, and `importlib.invalidate_caches()`, which each task calls, reads the directories of
all archives there before Python 3.13 (python/cpython#103200): 100 ms a task, most of what a small
one takes. Run as `python -m` by `spark.python.daemon.module`.
"""

import importlib
import sys
import zipimport

NEEDED = ("pyspark_sqlbroker.replays.writer", "pandas")
"""They take a worker two seconds, and a worker that has nothing to do ends after a minute."""


def quick() -> None:
    """Keep what is known of archives: none changes while tests run."""
    if sys.version_info < (3, 13):
        zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    from pyspark.daemon import manager

    quick()
    for name in NEEDED:
        importlib.import_module(name)
    manager()
