"""What errors from one cause have in common, though their texts differ."""

import hashlib
from collections import deque
from collections.abc import Iterator
from itertools import islice

FRAMES = 3
"""Innermost stack frames that count: the place that raised, and how it was reached."""
_MEMBERS = 5
"""Members of a group that count; there may be any number."""
LENGTH = 16
"""Hexadecimal digits: 64 bits, so a million different errors hardly ever collide."""


def error_fingerprint(error: BaseException) -> str:
    """16 hexadecimal digits, the same for errors of one type from the same place in the code.

    The place is the module and the function of the innermost three frames of the traceback. Not in
    it are the text, which often names an id, and the line, which changes with the next release.
    """
    try:
        parts = "\n".join(_parts(error))
    except Exception:  # noqa: BLE001 - reads what the error's own class may compute
        parts = type.__getattribute__(type(error), "__qualname__")
    return hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:LENGTH]


def _parts(error: BaseException) -> Iterator[str]:
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    traceback = error.__traceback__
    last: deque[str] = deque(maxlen=FRAMES)
    while traceback is not None:
        frame = traceback.tb_frame
        last.append(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}")
        traceback = traceback.tb_next
    yield from last
    if isinstance(error, BaseExceptionGroup):
        for member in islice(error.exceptions, _MEMBERS):
            yield error_fingerprint(member)
