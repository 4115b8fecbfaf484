"""What answers of the server become."""

import httpx

from faststream_sqlbroker.exceptions import HttpError

TIMEOUT = 30.0
"""Seconds for one request, besides the time that the server is asked to wait."""


def refused(answer: httpx.Response) -> HttpError:
    """The error of an answer that says no."""
    try:
        told = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        told = "the answer has no text"
    return HttpError(answer.status_code, told)
