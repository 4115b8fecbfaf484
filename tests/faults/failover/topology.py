"""Servers of which one takes the place of another, and the ways that lead to them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Way:
    """How a process reaches the servers."""

    url: str
    broker: Mapping[str, Any] = field(default_factory=dict)
    """Options of its broker."""


class Topology(ABC):
    """Servers that are ready, and the ways of workers and of the application to them.

    What strikes them are methods of its own; they block, so that `FailoverCell.do` calls them.
    """

    kind: str
    """The database."""
    straight: str = ""
    """The URL by which the machine itself reaches the server that takes writes."""
    ways: Mapping[str, Way]
    ids_rise: bool = True
    """Whether a message that is published later has a higher id, whichever way it takes."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Of the servers, as the document names it."""

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> None:
        """Make `ways` and `straight`; what they need is closed with `stack`."""

    @abstractmethod
    async def prepare(self) -> None:
        """Return when another server can take over, of which a row that was written now is the
        proof."""

    @abstractmethod
    async def lead_to_new(self) -> None:
        """Let all ways lead to the server that takes writes now."""
