"""Plain messages for values that do not fit: the requirement, and the value's type.

A value may be a password, so it is only shown for a choice of few values or a range of numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.text import format_value

_MUST = "it must be "
_GOT = ", got "
_PYDANTIC = "Input should be "
_REQUIREMENTS: Mapping[str, str] = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
}
"""Required values, by the type of Pydantic's error."""
_KINDS: Mapping[type, str] = {type(None): "nothing", str: "text", list: "a list", dict: "a mapping"}
_REMEDIES: Mapping[tuple[str, type], str] = {
    ("string_type", int): ": put it in quotes",
    ("string_type", float): ": put it in quotes",
    ("int_type", str): ": write it as digits without quotes",
    ("float_type", str): ": write it as digits without quotes",
}
"""Remedies for a value that may be right but is written in another form."""


def format_requirement(requirement: str, value: object, hint: str = "") -> str:
    """Return the message for a value that does not meet a requirement.

    Only the value's type is named: the value may be a password.
    """
    return f"{_MUST}{requirement}{_GOT}{describe_kind(value)}{hint}"


def format_error(kind: str, text: str, value: object) -> str:
    """Return Pydantic's message in the terms of the file; another `text` is returned unchanged.

    Args:
        kind: Type of Pydantic's error.
        text: Message of the error.
        value: The invalid value.
    """
    if kind in _REQUIREMENTS and text.startswith("Input"):
        if isinstance(value, float) and kind.startswith("int"):
            return f"{_MUST}{_REQUIREMENTS[kind]}{_GOT}{value}"
        return format_requirement(
            _REQUIREMENTS[kind], value, _REMEDIES.get((kind, type(value)), "")
        )
    if not text.startswith(_PYDANTIC):
        return text
    display_value = (
        format_value(value) if isinstance(value, (str, int, float)) else describe_kind(value)
    )
    return f"{_MUST}{text.removeprefix(_PYDANTIC)}{_GOT}{display_value}"


def describe_kind(value: Any) -> str:
    """Name the type of a YAML value."""
    if isinstance(value, bool):
        return str(value).lower()
    return _KINDS.get(type(value), "a number")


def merge_errors(texts: Sequence[str]) -> str:
    """Merge the errors of a value that may have several forms.

    Pydantic returns an error for each form. Together they read, for example, "it must be text or a
    list, got a number", unless they are of different kinds.
    """
    requirements = [text.removeprefix(_MUST).partition(_GOT)[0] for text in texts]
    values = {text.partition(_GOT)[2].partition(":")[0] for text in texts}
    if all(text.startswith(_MUST) for text in texts) and len(values) == 1:
        return f"{_MUST}{' or '.join(requirements)}{_GOT}{values.pop()}"
    return " or ".join(texts)
