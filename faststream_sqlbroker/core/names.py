"""What may be the name of a queue; the same on every database."""

import re
from functools import lru_cache

LONGEST_NAME = 255

_SURROGATE = re.compile("[\ud800-\udfff]")


def name_problem(value: object) -> str | None:
    """Say what is wrong with `value` as a queue's name, or return None if nothing is.

    A name is 1 to 255 characters that can be encoded, without NUL and without a space at its end (MySQL
    and MariaDB compare "a " and "a" as equal, the others do not).
    """
    if not isinstance(value, str):
        return f"it must be a string, not {type(value).__name__}"
    return _text_problem(str(value))


@lru_cache(maxsize=1024)
def _text_problem(value: str) -> str | None:
    problems = (
        (not value, "it must not be empty"),
        (
            len(value) > LONGEST_NAME,
            f"it has {len(value)} characters, at most {LONGEST_NAME} are allowed",
        ),
        ("\x00" in value, "it must not hold a NUL character"),
        (_SURROGATE.search(value), "it must not hold a lone surrogate"),
        (value.endswith(" "), "it must not end in a space"),
    )
    return next((text for found, text in problems if found), None)
