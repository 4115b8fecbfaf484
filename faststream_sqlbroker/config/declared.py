"""Names, types and meanings of options, from their declarations in Python."""

import ast
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, get_type_hints

from faststream import AckPolicy

from faststream_sqlbroker.core.channels import Channels, Queues
from faststream_sqlbroker.core.retention import Retention
from faststream_sqlbroker.core.stored import Redact

FOR_TYPE_CHECKERS = {
    "AckPolicy": AckPolicy,
    "Channels": Channels,
    "Queues": Queues,
    "Redact": Redact,
    "Retention": Retention,
}
"""Names in annotations that their modules import for type checkers only."""


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option."""

    name: str
    hint: Any
    is_required: bool
    description: str | None


def list_dict_options(declared: type) -> list[Option]:
    """Return the options of a TypedDict; all are optional.

    The string below an option is its description.
    """
    meanings = _read_attribute_docs(declared)
    hints = get_type_hints(declared)
    return [Option(name, hint, False, meanings.get(name)) for name, hint in hints.items()]


def list_call_options(
    function: Callable[..., Any],
    *,
    exclude: Collection[str] = (),
    doc: str | None = None,
) -> list[Option]:
    """Return the arguments of a function, without `self`.

    The keys of a YAML file have the names, types and descriptions of these arguments.

    Args:
        function: The function.
        exclude: Names to leave out.
        doc: Text with a section "Args"; by default the docstring.
    """
    target: Any = inspect.unwrap(function)
    parameters = {
        parameter.name: parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        and parameter.name not in {"self", *exclude}
        and not parameter.name.startswith("_")
    }
    # Only the selected parameters: others may have types that exist for type checkers only.
    annotated: Any = SimpleNamespace(
        __annotations__={name: parameter.annotation for name, parameter in parameters.items()}
    )
    hints = get_type_hints(annotated, globalns=target.__globals__, localns=FOR_TYPE_CHECKERS)
    meanings = _parse_argument_docs(doc or inspect.getdoc(target) or "")
    return [
        Option(name, hints[name], parameter.default is parameter.empty, meanings.get(name))
        for name, parameter in parameters.items()
    ]


def list_class_options(declared: type) -> list[Option]:
    """Return the arguments of a class.

    They are described in the section "Args" of `__init__`, or of the class.
    """
    init: Any = vars(declared).get("__init__")
    init_doc = inspect.getdoc(init) or ""
    doc = init_doc if "Args:" in init_doc else inspect.getdoc(declared)
    return list_call_options(init, doc=doc)


def _read_attribute_docs(declared: type) -> dict[str, str]:
    """Return the docstring of each attribute; empty if the source is not available.

    Python does not keep the string below an attribute, so the class's source is parsed.
    """
    try:
        tree = ast.parse(dedent(inspect.getsource(declared)))
    except (OSError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for node, next_node in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(next_node, ast.Expr)
            and isinstance(next_node.value, ast.Constant)
        ):
            docs[ast.unparse(node.target)] = " ".join(str(next_node.value.value).split())
    return docs


_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n(?:     .*)?)*)", re.MULTILINE)
"""Matches an argument and its text, with the lines that are indented further."""


def _parse_argument_docs(doc: str) -> dict[str, str]:
    """Return the text of each argument in the section "Args", on one line.

    The section ends where a line is not indented. In a file these texts describe the options.
    """
    section = re.split(r"\n(?=\S)", doc.partition("Args:\n")[2])[0]
    return {match[1]: " ".join(match[2].split()) for match in _ARGUMENT.finditer(section)}
