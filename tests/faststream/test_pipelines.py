"""Pipelines: several forwarding subscribers as one service."""

import json
import warnings
from typing import Any

import pytest
from faststream.specification import AsyncAPI

from faststream_sqlbroker import (
    DESTINATION,
    Pipeline,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlBrokerRouter,
    Step,
)
from faststream_sqlbroker.core.rows import NewMessage
from tests.faststream.conftest import QUICK, Look
from tests.faststream.test_forward import OPAQUE, all_in

URL = "sqlite+aiosqlite:///x.db"


def document(broker: SqlBroker, version: str) -> tuple[dict[str, Any], str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = AsyncAPI(broker, title="t", schema_version=version).to_specification().to_json()
    return json.loads(shown), shown


@pytest.mark.capability("pipelines: forwarding steps as one service")
async def test_a_service_of_three_steps(broker: SqlBroker, look: Look) -> None:
    """Z1 and Z12: each step moves on what it got, and the handler gets it once."""
    got: list[tuple[str, str]] = []
    broker.pipeline(
        "Email",
        Step("email", **QUICK),
        Step("email.last", **QUICK, ordered=True),
        Step("email.paced", **QUICK, max_workers=2),
        forward_to="email.send",
    )

    @broker.subscriber("email.send", **QUICK)
    async def send(body: str, message: SqlBrokerMessage) -> None:
        got.append((message.key or "", body))

    await broker.start()
    bodies = (SqlBrokerResponse(f"n{n}", key=f"user{n % 4}") for n in range(40))
    await broker.publish_batch(*bodies, queue="email")
    rows = await look.archived(40)
    assert sorted(got) == sorted((f"user{n % 4}", f"n{n}") for n in range(40))
    assert {(row["queue"], row["publish_count"]) for row in rows} == {("email.send", 1)}


async def test_opaque_bodies_to_a_destination(broker: SqlBroker, look: Look) -> None:
    """Z11."""
    broker.pipeline("Any", Step("a", **QUICK), Step("b", **QUICK), forward_to=DESTINATION)
    await broker.config.store.insert([NewMessage("a", OPAQUE, '{"destination": "x"}')] * 20)
    await broker.start()
    rows = await all_in(look, "x", 20)
    assert {bytes(row["payload"]) for row in rows} == {OPAQUE}


def test_the_pipelines_of_a_broker_and_its_routers() -> None:
    broker = SqlBroker(URL, logger=None)
    router = SqlBrokerRouter("r.")
    inner = SqlBrokerRouter("i.")
    own = broker.pipeline("Own", Step("a"), Step("b"), forward_to="c")
    other = router.pipeline("Other", Step("a"), forward_to="d")
    deep = inner.pipeline("Deep", Step("a"), forward_to=DESTINATION)
    router.include_router(inner)
    broker.include_router(router)
    assert broker.pipelines == [own, other, deep]
    assert isinstance(own, Pipeline)
    assert (own.name, own.steps, own.forward_to, str(own)) == ("Own", ("a", "b"), "c", "a → b → c")
    assert (other.steps, other.forward_to) == (("r.a",), "r.d")
    assert (str(deep), deep.forward_to) == ("r.i.a → (header destination)", DESTINATION)
    assert repr(own) == "<Pipeline Own: a → b → c>"
    assert (own.step_of("b"), own.step_of("c")) == (2, None)


@pytest.mark.parametrize("version", ["2.6.0", "3.0.0"])
def test_a_service_in_documents(version: str) -> None:
    broker = SqlBroker(URL, logger=None, tags=[{"name": "mine"}])
    router = SqlBrokerRouter("p.")
    router.pipeline("Email", Step("email"), Step("email.paced"), forward_to="email.send")
    broker.include_router(router)
    broker.pipeline("Hidden", Step("hidden"), forward_to="x", include_in_schema=False)
    broker.pipeline("Told", Step("told"), forward_to=DESTINATION, description="by hand")
    broker.subscriber("door", forward_to=DESTINATION)
    broker.subscriber({"high": 5, "low": 1}, forward_to="both")

    shown, text = document(broker, version)
    assert set(shown["channels"]) == {
        "p.email:Email",
        "p.email.paced:Email",
        "told:Told",
        "door:Forward",
        "high:Forward",
        "low:Forward",
    }
    first = shown["channels"]["p.email:Email"]["description"]
    assert first.startswith(
        "Step 1 of 2 of the service Email: p.email → p.email.paced → p.email.send."
    )
    assert shown["channels"]["told:Told"]["description"] == "by hand"
    assert (
        "the queue named in the header 'destination'"
        in shown["channels"]["door:Forward"]["description"]
    )
    assert "Opaque: any bytes." in text
    [server] = shown["servers"].values()
    assert {tag["name"]: tag.get("description") for tag in server["tags"]} == {
        "mine": None,
        "Email": "p.email → p.email.paced → p.email.send",
        "Hidden": "hidden → x",
        "Told": "told → (header destination)",
    }


@pytest.mark.parametrize(
    ("name", "steps", "forward_to", "problem"),
    [
        ("", [Step("a")], "b", "the name of a pipeline must be text"),
        (7, [Step("a")], "b", "the name of a pipeline must be text"),
        ("P", [], "b", "has no steps: give at least one Step"),
        ("P", ["a"], "b", r"the steps of a pipeline must be Step\(queue, ...\), got 'a'"),
        ("P", [Step("a"), Step("a")], "b", "has the queue 'a' twice"),
        ("P", [Step("a"), Step("b")], "a", "forward_to='a' is a step of the pipeline 'P' itself"),
        ("P", [Step("a")], "", "forward_to cannot be ''"),
        ("P", [Step("a")], None, "forward_to cannot be None"),
        ("P", [Step("a"), Step("b", max_workers=0)], "c", "max_workers must be"),
        ("P", [Step("a"), Step("b", transactional=True)], "c", "transactional is for handlers"),
        ("Taken", [Step("a")], "b", "the pipeline 'Taken' already exists"),
    ],
)
def test_an_invalid_pipeline_is_refused(
    name: Any, steps: Any, forward_to: Any, problem: str
) -> None:
    broker = SqlBroker(URL, logger=None)
    broker.pipeline("Taken", Step("t"), forward_to="u")
    with pytest.raises(SetupError, match=problem):
        broker.pipeline(name, *steps, forward_to=forward_to)
    assert [pipeline.name for pipeline in broker.pipelines] == ["Taken"]
    assert len(broker.subscribers) == 1, "nothing is left of it"


@pytest.mark.parametrize(
    ("queue", "options", "problem"),
    [
        ("", {}, "a pipeline step cannot have the queue ''"),
        (["a"], {}, r"a pipeline step cannot have the queue \['a'\]"),
        ("a", {"forward_to": "b"}, "its messages go to the next step: omit it"),
    ],
)
def test_an_invalid_step_is_refused(queue: Any, options: Any, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        Step(queue, **options)


async def test_an_explanation_names_the_step(broker: SqlBroker) -> None:
    """Z12: one service, wherever a message of it waits."""
    router = SqlBrokerRouter("p.")
    router.pipeline("Email", Step("email"), Step("email.paced"), forward_to="email.send")
    broker.include_router(router)
    message_id = await broker.publish("x", "p.email.paced")
    assert message_id is not None
    assert (await broker.admin.explain(message_id)).pipeline == "step 2 of 2 of Email"
