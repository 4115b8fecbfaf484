"""A value that does not fit, in plain words: what it must be, and what was given.

A value itself may be a password, so it is shown only where there are few to choose from, or where
there is a range of numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.text import short

_MUST = "it must be "
_GOT = ", got "
_PYDANTIC = "Input should be "
_WANTED: Mapping[str, str] = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
}
"""By the kind of a mistake of Pydantic: what the value must be."""
_KINDS: Mapping[type, str] = {type(None): "nothing", str: "text", list: "a list", dict: "a mapping"}
_QUOTES: Mapping[tuple[str, type], str] = {
    ("string_type", int): ": put it in quotes",
    ("string_type", float): ": put it in quotes",
    ("int_type", str): ": write it as digits without quotes",
    ("float_type", str): ": write it as digits without quotes",
}
"""What to do, where the value may be right and is written in another way."""


def must_be(wanted: str, given: object, hint: str = "") -> str:
    """The text of a mistake."""
    return f"{_MUST}{wanted}{_GOT}{kind_of(given)}{hint}"


def plain(kind: str, text: str, given: object) -> str:
    """What Pydantic says of a value, in words of the file; `text` as it is if it is not Pydantic's.

    Args:
        kind: Of the mistake, as Pydantic names it.
        text: Pydantic's.
        given: The value.
    """
    if kind in _WANTED and text.startswith("Input"):
        if isinstance(given, float) and kind.startswith("int"):
            return f"{_MUST}{_WANTED[kind]}{_GOT}{given}"
        return must_be(_WANTED[kind], given, _QUOTES.get((kind, type(given)), ""))
    if not text.startswith(_PYDANTIC):
        return text
    told = short(given) if isinstance(given, (str, int, float)) else kind_of(given)
    return f"{_MUST}{text.removeprefix(_PYDANTIC)}{_GOT}{told}"


def kind_of(value: Any) -> str:
    """What a value of YAML is."""
    if isinstance(value, bool):
        return str(value).lower()
    return _KINDS.get(type(value), "a number")


def either(texts: Sequence[str]) -> str:
    """The mistakes of a value that may have one of several forms, as one."""
    begins = [text.removeprefix(_MUST).partition(_GOT)[0] for text in texts]
    ends = {text.partition(_GOT)[2].partition(":")[0] for text in texts}
    if all(text.startswith(_MUST) for text in texts) and len(ends) == 1:
        return f"{_MUST}{' or '.join(begins)}{_GOT}{ends.pop()}"
    return " or ".join(texts)
