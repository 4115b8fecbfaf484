"""The browser of the dashboard's tests: Debian's Chromium."""

from tools.packages import install
from tools.private import CannotDownloadError, CannotStartError, find

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Path of a Chromium, which is installed with apt if it is missing and we may.

    Raises:
        CannotDownloadError: apt has failed to bring it, twice.
        CannotStartError: it is not there and cannot be installed.
    """
    path = _found()
    if path is not None:
        return path
    problem = install("chromium")
    path = _found()
    if path is not None:
        return path
    msg = f"no Chromium: {problem or 'the package chromium does not bring it'}"
    if problem is not None and problem.endswith("failed"):
        raise CannotDownloadError(msg)
    raise CannotStartError(msg)


def _found() -> str | None:
    return next((path for name in PROGRAMS if (path := find(name)) is not None), None)
