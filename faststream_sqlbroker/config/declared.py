"""What is declared in Python already: names, types and meanings of options."""

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
"""What annotations name that their modules import for type checkers only."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    name: str
    hint: Any
    needed: bool
    meaning: str | None


def options_of_dict(declared: type) -> list[Option]:
    """Those of a TypedDict, none of which is needed."""
    meanings = _attribute_docs(declared)
    hints = get_type_hints(declared)
    return [Option(name, hint, False, meanings.get(name)) for name, hint in hints.items()]


def options_of_call(
    function: Callable[..., Any],
    *,
    without: Collection[str] = (),
    doc: str | None = None,
) -> list[Option]:
    """The arguments of a function, without `self`.

    Args:
        function: It.
        without: Not these names.
        doc: The text that has a section "Args"; default the docstring.
    """
    target: Any = inspect.unwrap(function)
    chosen = {
        parameter.name: parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        and parameter.name not in {"self", *without}
        and not parameter.name.startswith("_")
    }
    # Only of the chosen ones: others may name types that are there for type checkers only.
    annotated: Any = SimpleNamespace(
        __annotations__={name: parameter.annotation for name, parameter in chosen.items()}
    )
    hints = get_type_hints(annotated, globalns=target.__globals__, localns=FOR_TYPE_CHECKERS)
    meanings = _argument_docs(doc or inspect.getdoc(target) or "")
    return [
        Option(name, hints[name], parameter.default is parameter.empty, meanings.get(name))
        for name, parameter in chosen.items()
    ]


def options_of_class(declared: type) -> list[Option]:
    """The arguments that a class is made of."""
    init: Any = vars(declared).get("__init__")
    own = inspect.getdoc(init) or ""
    doc = own if "Args:" in own else inspect.getdoc(declared)
    return options_of_call(init, doc=doc)


def _attribute_docs(declared: type) -> dict[str, str]:
    """The docstring below each attribute; none where the source is not there."""
    try:
        tree = ast.parse(dedent(inspect.getsource(declared)))
    except (OSError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[ast.unparse(node.target)] = " ".join(str(following.value.value).split())
    return found


_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n(?:     .*)?)*)", re.MULTILINE)
"""An argument, and its text with the lines that are further in."""


def _argument_docs(doc: str) -> dict[str, str]:
    """What the section "Args" says of each argument."""
    section = re.split(r"\n(?=\S)", doc.partition("Args:\n")[2])[0]
    return {match[1]: " ".join(match[2].split()) for match in _ARGUMENT.finditer(section)}
