"""The pages: what they show, to whom, and that nothing in them runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sqlalchemy import text as sql

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.core.channels import Channels
from faststream_sqlbroker.core.policies import Window
from faststream_sqlbroker.core.stored import StoredMessage
from faststream_sqlbroker.http.dashboard import fleet, routes
from faststream_sqlbroker.http.dashboard.rendering import MAX_BODY, create_environment, format_body
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.dashboard.conftest import EVIL, PAGES, fill, hidden, post, token_of
from tests.http.dashboard.reading import Reader, shown

pytestmark = pytest.mark.capability("HTTP: a dashboard")


async def read(client: httpx.AsyncClient, path: str, name: str = "ola") -> Reader:
    answer = await client.get(path, auth=as_user(name))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert EVIL not in answer.text
    page = Reader(answer.text)
    assert page.landmarks == {"main", "nav", "header", "h1"}
    assert not page.unlabelled
    return page


@pytest.fixture
async def attacked(broker: SqlBroker) -> dict[str, int]:
    """Every name, header, body and error is an attack."""
    broker.publish_on_schedule(EVIL, "5 4 * * 1", "scheduled", EVIL)

    @broker.subscriber("policied", policies=[Window("00:00", "00:01", tz="UTC")])
    async def handle(_body: dict) -> None: ...

    await broker.publish({}, "policied", lookup=EVIL, info=EVIL)
    return await fill(broker, EVIL)


@on_sqlite
async def test_no_name_body_header_or_error_runs_on_any_page(
    broker: SqlBroker, attacked: dict[str, int]
) -> None:
    query = httpx.QueryParams({"name": EVIL})
    async with (
        client_of(broker.asgi(logins(), channels=Channels())) as client,
        broker.lock(EVIL, lease="10m"),
    ):
        for path in PAGES:
            await read(client, path)
        assert EVIL in (await read(client, "/")).text
        assert EVIL in (await read(client, "/ui/queues")).text
        assert EVIL in (await read(client, f"/ui/queue?{query}")).text
        assert EVIL in (await read(client, "/ui/messages")).text
        assert EVIL in (await read(client, "/ui/dead-letters")).text
        assert EVIL in (await read(client, "/ui/locks")).text
        assert EVIL in (await read(client, "/ui/schedules")).text
        assert EVIL in (await read(client, "/ui/audit")).text
        looked = httpx.QueryParams({"lookup": EVIL, "info": EVIL})
        mirrored = await read(client, f"/ui/mirror?{looked}")
        assert "1 live message matches." in mirrored.text
        assert EVIL in mirrored.text
        async with broker.engine.begin() as connection:
            await connection.execute(sql("UPDATE message SET state = 'RETRYABLE'"))
        verified = await read(client, "/ui/verify?run=on")
        assert "retry_without_attempt" in verified.text
        assert EVIL in verified.text
        for number in attacked.values():
            page = await read(client, f"/ui/messages/{number}")
            assert "alert(1)" in page.text
        searched = httpx.QueryParams({"queue": EVIL, "key": EVIL, "header": EVIL, "value": EVIL})
        page = await read(client, f"/ui/messages?{searched}")
        assert str(attacked["waits"]) in page.text
        # A link cannot bring a text of its own.
        assert "call us" not in (await read(client, "/ui/locks?note=call+us")).text


@on_sqlite
async def test_no_name_runs_on_the_pages_of_a_dry_run_its_job_and_errors(
    broker: SqlBroker, attacked: dict[str, int]
) -> None:
    async with client_of(broker.asgi(logins())) as client:
        search = {"queue": EVIL, "key": EVIL, "header": EVIL, "value": EVIL}
        ola = as_user("ola")
        planned = await post(client, "/ui/plan", ola, action="cancel", why=EVIL, **search)
        page = shown(planned)
        assert "1 message matches now" in page.text
        assert page.text.count(EVIL) >= 4
        plan = {name: hidden(planned.text, name) for name in ("plan", "signature")}
        begun = await post(client, "/ui/begin", ola, **plan)
        path = begun.headers["location"].partition("?")[0]
        assert EVIL in (await read(client, path)).text
        await read(client, "/ui/jobs")
        for wrong in (f"state={EVIL}", f"since={EVIL}", f"after={EVIL}", f"error={EVIL}"):
            shown(await client.get(f"/ui/messages?{wrong}", auth=ola))
        shown(await client.get(f"/ui/none/{EVIL}", auth=ola))
        shown(await post(client, "/ui/plan", ola, action=EVIL))
        shown(await post(client, "/ui/release", ola, worker=EVIL))
    assert attacked


@on_sqlite
async def test_the_overview_tells_problems_first(
    broker: SqlBroker, attacked: dict[str, int]
) -> None:
    async with client_of(broker.asgi(logins())) as client:
        text = " ".join((await read(client, "/", "vic")).text.split())
    assert text.index("Problems") < text.index("Ready")
    assert f"paused {EVIL}: paused by {EVIL}: {EVIL}" in text
    assert "1 message failed in the last hour" in text


@on_sqlite
async def test_the_list_of_jobs_says_how_far_it_looks(web: httpx.AsyncClient) -> None:
    # An old job, behind 1,000 other actions, is not in it.
    page = await read(web, "/ui/jobs")
    assert (
        "the bulk jobs among the last 1,000 actions. The audit lists all actions of a year."
        in " ".join(page.text.split())
    )


@on_sqlite
async def test_strange_addresses_are_told_so(web: httpx.AsyncClient) -> None:
    for path, status in [
        ("/ui/messages/77", 404),
        ("/ui/messages/99999999999999999999999", 400),
        (f"/ui/messages/{'9' * 5000}", 400),
        ("/ui/messages/abc", 400),
        ("/ui/jobs/none", 404),
        ("/ui/queue", 400),
        (f"/ui/queue?name={'x' * 300}", 400),
        ("/ui/messages?state=odd", 400),
        ("/ui/messages?since=yesterday", 400),
        ("/ui/messages?since=0001-01-01T00:00:00%2B01:00", 400),
        ("/ui/dead-letters?until=9999-12-31T23:59:59-01:00", 400),
        ("/ui/messages?header=only", 400),
        ("/ui/messages?after=odd", 400),
        ("/ui/messages?queue=%00", 400),
        ("/ui/audit?before=%00", 400),
        ("/ui/verify?after=odd", 400),
        (f"/ui/mirror?lookup={'x' * 300}", 400),
        (f"/ui/mirror?lookup=x&info={'x' * 1_001}", 400),
        ("/ui/mirror?lookup=%00", 400),
        ("/ui/jobs/%00", 400),
        ("/ui/static/../routes.py", 404),
        ("/ui/static/%2e%2e/routes.py", 404),
        ("/ui/none", 404),
    ]:
        answer = await web.get(path, auth=as_user("vic"))
        assert answer.status_code == status, (path, answer.text)
        assert "content-security-policy" in answer.headers


@on_sqlite
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/ui/messages/987", "message 987 does not exist, live or archived: retention may have "),
        ("/ui/jobs/none", "job &#39;none&#39; does not exist, or is older than a year"),
        ("/ui/queue", "the address has no queue name: add ?name= and the name of the queue"),
        ("/ui/messages?since=0001-01-01T00:00:00%2B01:00", "in UTC, got &#39;0001-01-01T"),
    ],
)
async def test_errors_say_what_was_given(web: httpx.AsyncClient, path: str, text: str) -> None:
    assert text in (await web.get(path, auth=as_user("ola"))).text


@on_sqlite
async def test_half_a_character_in_a_body_is_shown(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    number = await broker.publish(
        b'{"half": "\\ud83d"}', "a", headers={"content-type": "application/json"}
    )
    page = await read(web, f"/ui/messages/{number}")
    assert '"half": "\\ud83d"' in page.text


@on_sqlite
async def test_who_is_not_known_sees_nothing(web: httpx.AsyncClient) -> None:
    for path in (*routes.PAGES, "/ui/live", f"/ui/messages/{'9' * 5000}"):
        answer = await web.get(path.replace("{message}", "1").replace("{job}", "x"))
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Basic")
        assert "ui/live" not in answer.text
    assert (await web.get("/ui/static/dashboard.css")).status_code == 200


@on_sqlite
async def test_bodies_can_be_hidden_and_messages_redacted(broker: SqlBroker) -> None:
    ids = await fill(broker, "secret")

    def redact(message: StoredMessage) -> StoredMessage:
        error = None if message.last_error is None else "taken out"
        return replace(message, body="***", headers={}, last_error=error)

    async with client_of(broker.asgi(logins(), show_bodies=False)) as client:
        page = await read(client, f"/ui/messages/{ids['done']}")
        assert "hidden here" in page.text
        assert '"secret": "secret"' not in page.text
        assert "Header value" not in (await read(client, "/ui/messages")).text
        guess = {"header": "secret", "value": "secret"}
        answer = await client.get("/ui/messages", params=guess, auth=as_user("vic"))
        assert answer.status_code == 403
        answer = await post(client, "/ui/plan", as_user("ola"), action="retry", **guess)
        assert answer.status_code == 403
        await errors_are_hidden(client, ids["failed"])

    def by_header(message: StoredMessage) -> StoredMessage:
        assert message.headers is not None
        assert message.body == {"secret": "secret"}
        return replace(message, last_error="of a secret" if "secret" in message.headers else "?")

    async with client_of(broker.asgi(logins(), redact=by_header, show_bodies=False)) as client:
        for path in (f"/ui/messages/{ids['failed']}", "/ui/messages?archived=on"):
            page = await read(client, path)
            assert "of a secret" in page.text
            assert "ValueError" not in page.text
            assert '"secret": "secret"' not in page.text
    async with client_of(broker.asgi(logins(), redact=redact)) as client:
        page = await read(client, f"/ui/messages/{ids['failed']}")
        assert "***" in page.text
        assert "taken out" in page.text
        for path in (f"/ui/messages/{ids['failed']}", "/ui/messages?archived=on"):
            assert "ValueError" not in (await read(client, path)).text
        assert "ValueError" not in (await read(client, "/ui/dead-letters")).text


async def errors_are_hidden(client: httpx.AsyncClient, failed: int) -> None:
    """They may quote a body, and who may search by them can guess them."""
    for path in (f"/ui/messages/{failed}", "/ui/messages?archived=on", "/ui/dead-letters", "/"):
        text = (await read(client, path)).text
        assert "ValueError" not in text
        assert "Error contains" not in text
    for path in ("/ui/messages?archived=on&error=Value", "/ui/dead-letters?error=Value"):
        answer = await client.get(path, auth=as_user("vic"))
        assert answer.status_code == 403
        assert "errors are hidden" in answer.text
    guess = {"action": "redrive", "error": "Value"}
    assert (await post(client, "/ui/plan", as_user("ola"), **guess)).status_code == 403


@on_sqlite
async def test_an_error_that_a_hook_leaves_as_it_is_stays_hidden(broker: SqlBroker) -> None:
    failed = (await fill(broker, "secret"))["failed"]
    app = broker.asgi(logins(), redact=lambda m: replace(m, body="***"), show_bodies=False)
    async with client_of(app) as client:
        await errors_are_hidden(client, failed)


@on_sqlite
async def test_hidden_headers_and_errors_are_in_no_list_of_actions(broker: SqlBroker) -> None:
    await fill(broker, "secret")
    headers = {"secret-name": "secret-value"}
    job = await broker.admin.bulk_retry(headers=headers, error="secret-error", dry_run=False)
    pages = ("/ui/jobs", f"/ui/jobs/{job.id}", "/ui/audit")
    for bodies in (True, False):
        async with client_of(broker.asgi(logins(), show_bodies=bodies)) as client:
            text = "".join([(await read(client, page)).text for page in pages])
            secrets = ("secret-name", "secret-value", "secret-error")
            assert [each in text for each in secrets] == [bodies] * 3
            for hidden in ("a hidden header", "a hidden error"):
                assert (hidden in text) is not bodies


@on_sqlite
async def test_it_can_be_left_out_and_is_found_below_a_path(broker: SqlBroker) -> None:
    async with client_of(broker.asgi(logins(), dashboard="off")) as client:
        assert (await client.get("/", auth=as_user("ann"))).status_code == 404
        assert (await client.get("/ui/queues", auth=as_user("ann"))).status_code == 404
        assert await token_of(client, as_user("ann"))
    _, app = broker.asgi(logins()).at("/broker")
    async with client_of(app) as client:
        answer = await client.get("/broker/ui/queues", auth=as_user("vic"))
        assert 'href="/broker/ui/messages"' in answer.text
        for path in ("/broker", "/broker/"):
            page = await read(client, path, "vic")
            assert "Problems" in page.text
        for host in ("broker.test", "other.test/x?y#z"):
            headers = {"Host": host}
            answer = await client.get("/broker/ui/queues", auth=as_user("vic"), headers=headers)
            assert 'href="/broker/ui/queues" aria-current="page"' in answer.text
        assert (await client.get("/broker/ui/static/dashboard.js")).status_code == 200


@on_sqlite
async def test_its_options_are_checked(broker: SqlBroker) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dashboard": "yes"}, "dashboard must be one of 'full', 'read_only', 'off'"),
        ({"show_bodies": "no"}, "show_bodies"),
        ({"redact": "shop:redact"}, "redact must be a function"),
    ]
    for options, text in wrong:
        with pytest.raises(SetupError, match=text):
            broker.asgi(logins(), **options)


@pytest.mark.usefixtures("database")
async def test_verify_goes_on_where_it_ended_and_tells_what_is_wrong(
    broker: SqlBroker, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [await broker.publish({}, "a", delay="1h") for _ in range(3)]
    before = await read(web, "/ui/verify", "vic")
    assert "rows checked" not in before.text
    assert "no damage found. All rows are checked." in (await read(web, "/ui/verify?run=on")).text
    async with broker.engine.begin() as connection:
        statement = "UPDATE message SET state = 'RETRYABLE' WHERE id = :id"
        await connection.execute(sql(statement), {"id": numbers[2]})
    page = await read(web, "/ui/verify?run=on", "vic")
    assert "1 retry_without_attempt: it is RETRYABLE but had no attempt" in page.text
    assert str(numbers[2]) in page.text
    monkeypatch.setattr(fleet, "MAX_ROWS", 1)
    path: str | None = "/ui/verify?run=on"
    found = ""
    for _ in range(20):
        if path is None:
            break
        answer = await web.get(path, auth=as_user("vic"))
        found += answer.text
        path = next(_links(answer.text, "next"), None)
    assert path is None
    assert "retry_without_attempt" in found


@pytest.mark.usefixtures("database")
async def test_messages_are_found_by_their_lookup_value(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    number = await broker.publish({}, "a", lookup="order 17", info="paid", delay="1h")
    link = f'href="/ui/messages/{number}"'
    for query, count in [("lookup=order+17", 1), ("lookup=order+17&info=open", 0), ("lookup=x", 0)]:
        page = (await web.get(f"/ui/mirror?{query}", auth=as_user("ola"))).text
        assert f"{count} live" in page
        assert (link in page) == bool(count)
    viewer = (await web.get("/ui/mirror?lookup=order+17", auth=as_user("vic"))).text
    assert "1 live message matches." in viewer
    assert link not in viewer
    assert "it." not in (await read(web, "/ui/mirror", "vic")).text


@on_sqlite
async def test_administrators_have_a_link_to_the_diagnosis(web: httpx.AsyncClient) -> None:
    for name, is_there in [("ann", True), ("ola", False), ("vic", False)]:
        answer = await web.get("/ui/queues", auth=as_user(name))
        assert ('href="/ui/diagnosis"' in answer.text) == is_there, name
    assert (await web.get("/diagnosis", auth=as_user("ann"))).status_code == 200


@on_sqlite
async def test_lists_are_pages_that_follow_each_other(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    for number in range(60):
        await broker.publish({"n": number}, "many")
    first = await web.get("/ui/messages?queue=many", auth=as_user("vic"))
    assert first.text.count("<tr>") == 51
    following = next(_links(first.text, "next"))
    second = await web.get(following, auth=as_user("vic"))
    assert second.text.count("<tr>") == 11
    assert not list(_links(second.text, "next"))


def _links(page: str, rel: str) -> Iterator[str]:
    import html
    import re

    for found in re.finditer(rf'rel="{rel}" href="([^"]+)"', page):
        yield html.unescape(found[1])


class Endless(list[int]):
    """A body of which not all may be read."""

    def __iter__(self) -> Iterator[int]:
        yield from range(MAX_BODY)
        raise AssertionError("it was read to its end")


@pytest.mark.parametrize("body", ["x" * 200_000, b"x" * 200_000, Endless([1])])
def test_the_beginning_of_a_long_body_is_made_and_shown(body: Any) -> None:
    found = format_body(body)
    assert found.endswith("\n… truncated: a page shows 100,000 characters")
    assert len(found) < MAX_BODY + 100
    assert format_body({"a": ["ü", None]}) == '{\n  "a": [\n    "ü",\n    null\n  ]\n}'


def test_no_template_trusts_a_text() -> None:
    templates = create_environment()
    assert templates.autoescape is True
    for name in templates.list_templates():
        source, *_ = templates.loader.get_source(templates, name)
        for trusted in ("|safe", "| safe", "autoescape", "style=", "onclick", "<script>"):
            assert trusted not in source, (name, trusted)


@pytest.mark.usefixtures("database")
async def test_every_page_opens_with_data_on_every_database(broker: SqlBroker) -> None:
    ids = await fill(broker, "orders")
    async with client_of(broker.asgi(logins(), channels=Channels())) as client:
        for path in PAGES:
            await read(client, path)
        page = await read(client, "/ui/queue?name=orders")
        assert "Paused since" in page.text
        for number in ids.values():
            assert "published" in (await read(client, f"/ui/messages/{number}")).text
        await broker._store.tokens.set_channel("c", by="ann")
        await broker._store.tokens.set_channel("c", "billing", kind="pull", token=None, by="ann")
        jobs = [await broker.publish({}, "c/billing") for _ in range(3)]
        await broker.admin.cancel(jobs[0])
        pulled = await client.get("/ui/channels", auth=as_user("vic"))
        assert "Diagnosis: no problems found" in (await read(client, "/ui/diagnosis", "ann")).text
        assert (await client.get("/ui/diagnosis", auth=as_user("ola"))).status_code == 403
        assert 'aria-label="Queued jobs of c/billing: 2"' in pulled.text
        assert 'aria-label="Dead jobs of c/billing: 1"' in pulled.text
        assert "queue=c%2Fbilling" in pulled.text
        assert "ValueError: orders" in (await read(client, "/ui/dead-letters")).text
        assert "1 message" in (await read(client, "/ui/dead-letters")).text
