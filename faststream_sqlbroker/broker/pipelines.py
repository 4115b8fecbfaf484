"""Pipelines: several subscribers without a handler that form one service."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from faststream.specification.schema.extra import Tag
from typing_extensions import Unpack

from faststream_sqlbroker.core.checks import find_queue_error
from faststream_sqlbroker.core.routing import MAX_HOPS, Destination, find_loop
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.options import SubscriberOptions, make_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from faststream.specification.schema.extra import TagDict

    from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


class Step:
    """A queue of a pipeline, with the options of the subscriber."""

    def __init__(self, queue: str, **options: Unpack[SubscriberOptions]) -> None:
        """Create a step with the options of `SqlBroker.subscriber`; the pipeline sets `forward_to`.

        Raises:
            SetupError: `queue` is not a valid name, or `forward_to` is passed.
        """
        if (problem := find_queue_error(queue)) is not None:
            raise SetupError(
                f"a pipeline step cannot have the queue {format_value(queue)}: {problem}"
            )
        if "forward_to" in options:
            raise SetupError(
                f"the step {queue!r} has forward_to={format_value(options['forward_to'])}, but its "
                "messages go to the next step: omit it, or set forward_to of the pipeline for the "
                "last step"
            )
        self.queue = queue
        self.options = options


class Pipeline:
    """A service whose steps move each message to the next step, created by `broker.pipeline`."""

    def __init__(self, name: str, subscribers: "Sequence[QueueSubscriber]") -> None:
        """Create a pipeline; `subscribers` are the steps, in order."""
        self.name = name
        self.subscribers = tuple(subscribers)

    @property
    def steps(self) -> tuple[str, ...]:
        """The queues of the steps, in order, with the routers' prefix."""
        return tuple(queue for subscriber in self.subscribers for queue in subscriber.queues)

    @property
    def forward_to(self) -> str | Destination:
        """The queue to which the last step moves messages, with the routers' prefix."""
        target = self.subscribers[-1].forward_to
        assert target is not None  # noqa: S101 - every step has one
        return target

    def step_of(self, queue: str) -> int | None:
        """Return the number of the step with `queue`, starting at 1; None if there is none."""
        steps = self.steps
        return steps.index(queue) + 1 if queue in steps else None

    def __str__(self) -> str:
        """Return the queues that a message passes, in order."""
        target = self.forward_to
        last = f"(header {target.value})" if isinstance(target, Destination) else target
        return " → ".join((*self.steps, last))

    def __repr__(self) -> str:
        """Return the name and the queues."""
        return f"<Pipeline {self.name}: {self}>"


class ServiceTags(Iterable["Tag | TagDict"]):
    """The tags of a broker in AsyncAPI documents, including a tag for each pipeline.

    Pipelines may be declared after the broker was created, so they are read for each document.
    """

    def __init__(
        self, tags: "Iterable[Tag | TagDict]", pipelines: "Callable[[], Iterable[Pipeline]]"
    ) -> None:
        """Store the broker's tags; `pipelines` is called for each document."""
        self._tags = tuple(tags)
        self._pipelines = pipelines

    def __iter__(self) -> "Iterator[Tag | TagDict]":
        """Yield the broker's tags, then the tags of the pipelines."""
        yield from self._tags
        for pipeline in self._pipelines():
            yield Tag(name=pipeline.name, description=str(pipeline))


def check_pipeline(
    name: object, steps: Sequence[Any], forward_to: str | Destination, existing_names: Iterable[str]
) -> None:
    """Check the arguments of `broker.pipeline`.

    Raises:
        SetupError: one of the arguments is not valid, or the name is in `existing_names`.
    """
    if not isinstance(name, str) or not name:
        raise SetupError(f"the name of a pipeline must be text, got {format_value(name)}")
    if name in existing_names:
        raise SetupError(f"the pipeline {format_value(name)} already exists: use another name")
    _check_step_list(name, steps)
    queues = [step.queue for step in steps]
    for n, queue in enumerate(queues):
        if queue in queues[:n]:
            raise SetupError(
                f"the pipeline {format_value(name)} has the queue {format_value(queue)} twice: "
                "list each queue once"
            )
    if forward_to in queues:
        raise SetupError(
            f"forward_to={format_value(forward_to)} is a step of the pipeline {format_value(name)} "
            "itself, so messages would circulate: use another queue"
        )
    if (
        not isinstance(forward_to, Destination)
        and (problem := find_queue_error(forward_to)) is not None
    ):
        raise SetupError(f"forward_to cannot be {format_value(forward_to)}: {problem}")


def _check_step_list(name: str, steps: Sequence[Any]) -> None:
    """Check the number and the types of a pipeline's steps, before their queues are read."""
    if not steps:
        raise SetupError(
            f"the pipeline {format_value(name)} has no steps: give at least one Step(queue)"
        )
    if len(steps) > MAX_HOPS:
        raise SetupError(
            f"the pipeline {format_value(name)} has {len(steps)} steps, but a message can move at "
            f"most {MAX_HOPS} times without a handler: use fewer steps"
        )
    for step in steps:
        if not isinstance(step, Step):
            raise SetupError(
                f"the steps of a pipeline must be Step(queue, ...), got {format_value(step)}"
            )


def check_step_options(steps: Sequence[Step], targets: Sequence[str | Destination]) -> None:
    """Check the options of all steps before the first subscriber is created.

    An error then leaves the broker without half a pipeline.

    Raises:
        SetupError: as for `make_settings`.
    """
    with warnings.catch_warnings():
        # These settings are only checked. Creating the subscriber makes them again, and warns.
        warnings.simplefilter("ignore")
        for step, target in zip(steps, targets, strict=True):
            make_settings(step.queue, {**step.options, "forward_to": target})


def find_forward_loop(subscribers: "Iterable[QueueSubscriber]") -> str | None:
    """Return a warning if the `forward_to` of the subscribers form a circle; otherwise None.

    The circle may be intended: a handler outside of this process may end it. A message in it
    becomes a dead letter after a limited number of moves.
    """
    loop = find_loop(
        (queue, target)
        for subscriber in subscribers
        if isinstance(target := subscriber.forward_to, str)
        for queue in subscriber.queues
    )
    if loop is None:
        return None
    route = " → ".join(loop)
    return (
        f"forward_to forms a loop: {route}; a message that moves {MAX_HOPS} times without a "
        "handler becomes a dead letter"
    )


def check_dead_letter_loop(subscribers: "Iterable[Any]") -> None:
    """Refuse subscribers with `forward_to` that are dead letter queues of each other.

    Moving a dead letter does not count as a hop, so a message that no subscriber can move would
    circulate forever.

    Raises:
        SetupError: there are such subscribers.
    """
    # `forward_to` itself may form a circle: its moves are counted and limited.
    loop = find_loop(
        (queue, target)
        for subscriber in subscribers
        if getattr(subscriber, "forward_to", None) is not None
        and (target := subscriber.dead_letter_queue) is not None
        for queue in subscriber.queues
    )
    if loop is not None:
        raise SetupError(
            "the dead letter queues of subscribers with forward_to form a loop: "
            f"{' → '.join(loop)}. Messages that cannot be moved would circulate forever: change or "
            "remove one dead_letter_queue"
        )
