"""Run a command, and end all that comes from it by SIGKILL, as a machine that loses its power.

    python subreaper.py COMMAND...

All ends when the command has ended, and when this process gets SIGTERM, SIGINT or SIGQUIT, such as
at the death of its own parent. Processes that have left their session, or lost their parent, end,
too. Another Python than that of this repository may run it, so it imports nothing of it.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def run(command: list[str]) -> None:
    """Run `command`, and return when nothing of it is left."""
    # What loses its parent becomes a child of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, _end)
    pid = subprocess.Popen(command).pid
    while os.wait()[0] != pid:
        pass
    _end_all()


def _end(*_: object) -> None:
    # It raises nothing: another signal may come at any moment of it.
    _end_all()
    os._exit(0)


def _end_all() -> None:
    """Kill children until there are none: those of a killed one come next."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    run(sys.argv[1:])
