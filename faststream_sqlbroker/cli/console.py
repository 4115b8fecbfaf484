"""How commands print: names and texts of others are shown as they are, and cannot drive the
terminal.
"""

from typing import Any

from rich.console import Console
from rich.text import Text

from faststream_sqlbroker.core.text import visible


class PlainConsole(Console):
    """A console to which text is text: no markup, no emoji codes, no colours of its own, no control
    characters.

    Args:
        stderr: Print there and not to stdout.
        width: Characters of a line; None: what the terminal has.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """As rich does it, for lines as well as cells and titles; U+FFFD stands for what would not
        be seen.
        """
        return super().render_str(visible(text), **options)
