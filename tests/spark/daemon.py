"""PySpark's daemon, whose workers do not read the directory of spark-core's jar again at every
task.

The jar is on the workers' path, and `importlib.invalidate_caches()`, which each task calls, reads
the directories of all archives there before Python 3.13 (python/cpython#103200): 100 ms a task,
most of what a small one takes. Run as `python -m` by `spark.python.daemon.module`.
"""

import sys
import zipimport


def quick() -> None:
    """Keep what is known of archives: none changes while tests run."""
    if sys.version_info < (3, 13):
        zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    from pyspark.daemon import manager

    quick()
    manager()
