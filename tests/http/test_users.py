"""Who may ask: passwords, proxies, roles, and failures."""

import asyncio
import inspect
from math import inf
from typing import Any

import pytest
from starlette.requests import HTTPConnection

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.core.channels import (
    RANDOM_TOKEN_LENGTH,
    QueueRole,
    RegisteredEndpoint,
    create_token,
    is_token_valid,
)
from faststream_sqlbroker.http import (
    BasicAuth,
    HttpApp,
    Login,
    ProxyAuth,
    Role,
    User,
    basic_auth,
    gate,
    hash_password,
)
from faststream_sqlbroker.http.basic_auth import (
    COST,
    StoredPassword,
    parse_credentials,
    parse_password_hash,
)
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.gate import (
    ADDRESS_FACTOR,
    NO_CREDENTIALS,
    RECENT_SECONDS,
    WRONG_CREDENTIALS,
)
from faststream_sqlbroker.http.lockout import MAX_KEYS, WINDOW, FailureCounter, VerifiedSecrets
from faststream_sqlbroker.http.responses import Problem
from tests.faststream.conftest import Heard
from tests.helpers import eventually
from tests.http.conftest import as_user, client_of, logins, on_sqlite
from tests.http.pulling import CHANNEL, JOBS, TOKENS, channels
from tests.http.queueing import PATH, PUBLISH, QUEUE, bearer, queues

pytestmark = pytest.mark.capability("HTTP: users with roles, rate limits, CSRF tokens")


def test_a_password_is_stored_as_a_salted_hash() -> None:
    first, second = hash_password("correct horse"), hash_password("correct horse")
    assert first != second
    assert "correct" not in first
    assert parse_password_hash(first).matches("correct horse")
    assert not parse_password_hash(first).matches("correct horsf")
    assert parse_password_hash(hash_password("päss-wörd €")).matches("päss-wörd €")


@pytest.mark.parametrize(
    "text",
    [
        "plain-password",
        "",
        "scrypt$16384$8$1$!!$!!",
        "scrypt$1000$8$1$AAAA$AAAA",
        f"scrypt${2**40}$8$1${'A' * 24}${'A' * 43}=",
        f"bcrypt$16384$8$1${'A' * 24}${'A' * 43}=",
        f"scrypt$16384$8$1$extra${'A' * 24}${'A' * 43}=",
        f"scrypt${COST}$8$1$AAAA$AAAA",
        None,
    ],
)
def test_what_is_no_hash_is_refused_and_not_shown(text: Any) -> None:
    with pytest.raises(SetupError, match="password_hash must have the form") as caught:
        Login("ann", "admin", text)
    assert "plain-password" not in str(caught.value)


def test_logins_and_users_are_checked() -> None:
    good = hash_password("long enough")
    with pytest.raises(SetupError, match="8 characters"):
        hash_password("short")
    with pytest.raises(SetupError, match="a role must be viewer, operator or admin, got 'root'"):
        Login("ann", "root", good)
    with pytest.raises(SetupError, match="must not contain a colon"):
        Login("a:b", "admin", good)
    with pytest.raises(SetupError, match="1 to 100 characters"):
        User("", "viewer")
    with pytest.raises(SetupError, match="two logins have the name 'ann'"):
        BasicAuth([Login("ann", "admin", good), Login("ann", "viewer", good)])
    with pytest.raises(SetupError, match="at least one Login"):
        BasicAuth([])
    assert repr(Login("ann", "admin", good)) == "Login('ann', 'admin')"
    assert User("ann", "Operator").may(Role.VIEWER)
    assert not User("ann", "operator").may(Role.ADMIN)


@on_sqlite
@pytest.mark.parametrize(
    "header",
    [
        None,
        "Basic",
        "Basic !!!",
        "Basic YW5u",
        "Bearer YW5uOmFubi1wYXNzd29yZA==",
        "Basic /////w==",
        "Basic YW5uOmFubi1wYXNzd29yZA==x",
    ],
)
async def test_unauthenticated(app: HttpApp, header: str | None) -> None:
    async with client_of(app) as client:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/csrf-token", "/metrics"):
            found = await client.get(path, headers=headers)
            assert found.status_code == 401
            assert found.headers["www-authenticate"].startswith("Basic ")
            assert found.json() == {"error": NO_CREDENTIALS}


@on_sqlite
async def test_a_wrong_password_and_an_unknown_name_look_alike(app: HttpApp, heard: Heard) -> None:
    async with client_of(app) as client:
        wrong = await client.get("/csrf-token", auth=("ann", "wrong-password"))
        unknown = await client.get("/csrf-token", auth=("nil\u202e", "wrong-password"))
        assert wrong.status_code == unknown.status_code == 401
        assert wrong.content == unknown.content
        assert wrong.json() == {"error": WRONG_CREDENTIALS}
    told = heard.texts("wrong password or token")
    assert len(told) == 2
    assert "wrong-password" not in "".join(told)
    assert "\u202e" not in "".join(told)


@on_sqlite
async def test_a_password_that_was_right_is_hashed_once(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    now = 1000.0
    monkeypatch.setattr(basic_auth, "monotonic", lambda: now)
    auth = logins()
    real = auth._is_password_right

    async def counting(stored: Any, password: str) -> bool:
        hashed.append(password)
        return await real(stored, password)

    monkeypatch.setattr(auth, "_is_password_right", counting)
    async with client_of(broker.asgi(auth)) as client:
        for _ in range(3):
            assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200
        assert hashed == ["vic-password"]
        assert (await client.get("/csrf-token", auth=("vic", "other-word"))).status_code == 401
        # Another user's password is not taken for this one's.
        assert (await client.get("/csrf-token", auth=("ola", "vic-password"))).status_code == 401
        now += basic_auth.VERIFIED_SECONDS + 1
        assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200
        assert hashed.count("vic-password") == 3


@on_sqlite
async def test_few_passwords_are_hashed_at_a_time(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hash takes a processor: a flood of them is refused, and the others go on."""
    auth = logins()
    go_on = asyncio.Event()

    async def slow(_function: Any, *_arguments: Any) -> bool:
        await go_on.wait()
        return False

    monkeypatch.setattr(basic_auth.asyncio, "to_thread", slow)
    async with client_of(broker.asgi(auth, max_failures=1000)) as client:
        asked = [
            asyncio.create_task(client.get("/csrf-token", auth=(f"u{n}", "wrong")))
            for n in range(basic_auth.MAX_WAITING)
        ]
        while auth._waiting < basic_auth.MAX_WAITING:
            await asyncio.sleep(0)
        refused = await client.get("/csrf-token", auth=("one", "more"))
        assert refused.status_code == 503
        go_on.set()
        assert {each.status_code for each in await asyncio.gather(*asked)} == {401}
        assert auth._waiting == 0


@on_sqlite
async def test_failures_are_limited_by_name_and_by_address(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), max_failures=3)
    async with client_of(app) as client:
        for _ in range(3):
            wrong = await client.get("/csrf-token", auth=("ann", "wrong-password"))
            assert wrong.status_code == 401
        # Then the right password is refused, too: else guessing would go on.
        refused = await client.get("/csrf-token", auth=as_user("ann"))
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        # Another user of the same address is let in, and ann from another address.
        assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200
        for number in range(27):
            await client.get("/csrf-token", auth=(f"user-{number}", "wrong-password"))
        assert (await client.get("/csrf-token", auth=as_user("ola"))).status_code == 429
        # She has just been let in here: others' guesses do not lock her out.
        assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200
        assert (await client.get("/health/live")).status_code == 200
    async with client_of(app, client=("192.0.2.99", 1)) as elsewhere:
        assert (await elsewhere.get("/csrf-token", auth=as_user("ann"))).status_code == 200


@on_sqlite
async def test_an_address_is_told_by_listed_proxies_only(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), max_failures=1, proxies=["10.0.0.0/8"])

    async def status(peer: str, forwarded: str) -> int:
        async with client_of(app, client=(peer, 1)) as client:
            headers = {"X-Forwarded-For": forwarded}
            found = await client.get("/csrf-token", auth=("ann", "wrong"), headers=headers)
            return found.status_code

    # A client that writes the header itself cannot change who it is.
    assert await status("10.0.0.1", "203.0.113.5, 198.51.100.7") == 401
    assert await status("10.0.0.1", "203.0.113.6, 198.51.100.7") == 429
    assert await status("10.0.0.1", "198.51.100.7, 10.0.0.9") == 429
    assert await status("10.0.0.1", "198.51.100.8") == 401
    # Some proxies write the client's port, too.
    assert await status("10.0.0.1", "198.51.100.8:4711") == 429
    assert await status("10.0.0.1", "198.51.100.6:4711, 10.0.0.9:80") == 401
    assert await status("10.0.0.1", "198.51.100.6:4712") == 429
    assert await status("10.0.0.1", "[2001:db8:0:2::1]:4711") == 401
    assert await status("10.0.0.1", "2001:db8:0:2::2") == 429
    assert await status("192.0.2.1", "203.0.113.5") == 401
    assert await status("192.0.2.1", "203.0.113.6") == 429
    # The owner of an IPv6 network has 2 ** 64 addresses.
    assert await status("2001:db8::1", "") == 401
    assert await status("2001:db8::2", "") == 429
    assert await status("2001:db8:0:1::1", "") == 401
    # A socket of IPv6 shows addresses of IPv4 in this form.
    assert await status("::ffff:192.0.2.7", "") == 401
    assert await status("192.0.2.7", "") == 429
    assert await status("::ffff:192.0.2.8", "") == 401
    assert await status("::ffff:10.0.0.1", "198.51.100.9") == 401
    assert await status("10.0.0.1", "198.51.100.9") == 429


@on_sqlite
async def test_a_password_that_was_right_lately_passes_while_others_guess(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy that is not listed all have one address."""
    now = 1000.0
    monkeypatch.setattr(gate, "monotonic", lambda: now)
    app = broker.asgi(logins(), max_failures=3)

    async def status(name: str, password: str) -> int:
        return (await client.get("/csrf-token", auth=(name, password))).status_code

    async with client_of(app) as client:
        assert await status(*as_user("ann")) == 200
        guesses = [await status("ann", f"guess-{n}") for n in range(5)]
        assert guesses == [401, 401, 401, 429, 429]
        assert await status(*as_user("ann")) == 200
        for n in range(3 * ADDRESS_FACTOR):
            await status(f"user-{n}", "guess")
        assert [await status(*as_user(name)) for name in ("ann", "vic")] == [200, 429]
        now += WINDOW
        assert [await status("vic", f"guess-{n}") for n in range(3)] == [401] * 3
        assert [await status(*as_user(name)) for name in ("ann", "vic")] == [200, 429]
        now += RECENT_SECONDS
        assert [await status("ann", f"guess-{n}") for n in range(3)] == [401] * 3
        assert await status(*as_user("ann")) == 429


@pytest.mark.attack(
    "many guesses at a password that was right lately from the same address, which would be let in "
    "during a lock-out",
    "ten times as many a minute as without; then it is locked out, too",
)
@on_sqlite
async def test_guesses_at_a_password_that_was_right_lately_are_limited(broker: SqlBroker) -> None:
    app = broker.asgi(logins(), max_failures=3)

    async def status(name: str, password: str) -> int:
        return (await client.get("/csrf-token", auth=(name, password))).status_code

    async with client_of(app) as client:
        assert [await status(*as_user(name)) for name in ("ann", "vic")] == [200, 200]
        guesses = [await status("ann", f"guess-{n}") for n in range(3 + 3 * ADDRESS_FACTOR - 1)]
        assert guesses == [401] * 3 + [429] * (3 * ADDRESS_FACTOR - 1)
        assert await status(*as_user("ann")) == 200
        assert await status("ann", "one more") == 429
        assert await status(*as_user("ann")) == 429
        # Neither do guesses at one name lock out the others, ...
        assert await status(*as_user("vic")) == 200
        # ... nor can a guesser take the place of what is remembered by other names.
        limiter = app._access_control
        sizes = [
            len(limiter._lockout_guesses._counts),
            len(limiter._verified_passwords._verified_at),
        ]
        for n in range(100):
            await status(f"user-{n}", "guess")
        assert [
            len(limiter._lockout_guesses._counts),
            len(limiter._verified_passwords._verified_at),
        ] == sizes
        assert len(limiter._name_failures._counts) <= 3 * ADDRESS_FACTOR
    # What is remembered is of one address: no guesser elsewhere gains by it.
    async with client_of(app, client=("192.0.2.99", 1)) as client:
        assert [await status("vic", f"guess-{n}") for n in range(3)] == [401] * 3
        assert await status(*as_user("vic")) == 429


@on_sqlite
async def test_guesses_are_limited_where_another_way_lets_the_request_in(broker: SqlBroker) -> None:
    """Else the answer, as another user, would tell which guess is right."""
    proxy = ProxyAuth("X-User", proxies=["192.0.2.1"], roles={"vic": "viewer"})
    app = broker.asgi([logins(), proxy], max_failures=3)

    async def status(password: str) -> int:
        auth = ("ann", password)
        return (await client.get("/csrf-token", auth=auth, headers={"X-User": "vic"})).status_code

    async with client_of(app) as client:
        assert [await status(f"guess-{n}") for n in range(4)] == [200] * 3 + [429]
        assert await status(as_user("ann")[1]) == 429
        # Without a password, the proxy's user is let in.
        assert (await client.get("/csrf-token", headers={"X-User": "vic"})).status_code == 200


@on_sqlite
async def test_a_remembered_password_must_still_be_right(broker: SqlBroker) -> None:
    """A password that was changed, or whose user was removed, is one guess more."""
    passwords = {"ann": "right", "vic": "right", "ola": "right"}

    def user(connection: HTTPConnection) -> User | None:
        name, password = parse_credentials(connection) or ("", "")
        return User(name, "admin") if passwords.get(name) == password else None

    async def status(name: str, password: str) -> int:
        return (await client.get("/csrf-token", auth=(name, password))).status_code

    async with client_of(broker.asgi(user, max_failures=3)) as client:
        for name in passwords:
            assert await status(name, "right") == 200
            assert [await status(name, "guess") for _ in range(4)] == [401] * 3 + [429]
        passwords["ann"] = "new"
        del passwords["vic"]
        assert [await status("ann", "right") for _ in range(2)] == [401, 429]
        assert [await status("vic", "right") for _ in range(2)] == [401, 429]
        assert await status("ola", "right") == 200


@on_sqlite
async def test_a_way_without_passwords_is_not_locked_out_by_guesses(broker: SqlBroker) -> None:
    by_proxy = ProxyAuth("X-User", proxies=["192.0.2.1"], roles={"vic": "viewer"})
    as_vic = {"X-User": "vic"}
    async with client_of(broker.asgi([by_proxy, logins()], max_failures=1)) as client:
        # The proxy's word for one user does not make a guess at another's password a right one.
        found = await client.get("/csrf-token", headers=as_vic, auth=("ann", "guess"))
        assert found.status_code == 200
        for n in range(ADDRESS_FACTOR):
            await client.get("/csrf-token", auth=(f"user-{n}", "guess"))
        assert (await client.get("/csrf-token", auth=("ann", "guess"))).status_code == 429
        assert (await client.get("/csrf-token", headers=as_vic)).status_code == 200
        assert (await client.get("/csrf-token")).status_code == 401


@on_sqlite
async def test_an_unknown_name_costs_as_much_as_one_that_is_known(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the hashes of users were made with other parameters."""
    hashes = {}
    for name, cost in (("ann", 2**4), ("vic", 2**5)):
        monkeypatch.setattr(basic_auth, "COST", cost)
        hashes[name] = hash_password(f"{name}-password")
    auth = BasicAuth([Login(name, "viewer", text) for name, text in hashes.items()])
    costs: list[int] = []
    real = auth._is_password_right

    async def counting(stored: StoredPassword, password: str) -> bool:
        costs.append(stored.cost)
        return await real(stored, password)

    monkeypatch.setattr(auth, "_is_password_right", counting)
    async with client_of(broker.asgi(auth, max_failures=1000)) as client:
        for n in range(50):
            for password in ("wrong", "ann-password", "vic-password"):
                found = await client.get("/csrf-token", auth=(f"user-{n}", password))
                assert found.status_code == 401
    assert set(costs) == {2**4, 2**5}
    assert costs[::3] == costs[1::3] == costs[2::3]


def test_failures_are_forgotten_and_bounded() -> None:
    now = 0.0
    failures = FailureCounter(2, lambda: now)
    failures.add("a")
    failures.check("a")
    failures.add("a")
    failures.check("b")
    with pytest.raises(Problem) as caught:
        failures.check("a")
    assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "60"})
    now = WINDOW
    failures.check("a")
    for n in range(MAX_KEYS + 10):
        failures.add(str(n))
    assert len(failures._counts) == MAX_KEYS


@on_sqlite
async def test_a_proxys_header_is_trusted_from_listed_addresses_only(broker: SqlBroker) -> None:
    roles = {"ann": "admin", "vic": Role.VIEWER}
    app = broker.asgi(ProxyAuth("X-Forwarded-User", proxies=["10.0.0.7"], roles=roles))
    header = "X-Forwarded-User"

    async def status(peer: str, headers: Any) -> int:
        async with client_of(app, client=(peer, 1)) as client:
            return (await client.get("/csrf-token", headers=headers)).status_code

    assert await status("10.0.0.7", {header: "ann"}) == 200
    assert await status("10.0.0.8", {header: "ann"}) == 401
    assert await status("192.0.2.1", {header: "ann", "X-Forwarded-For": "10.0.0.7"}) == 401
    assert await status("10.0.0.7", {header: "eve"}) == 401
    assert await status("10.0.0.7", {header: ""}) == 401
    assert await status("10.0.0.7", {header: "a" * 200}) == 401
    assert await status("10.0.0.7", {}) == 401
    # One of the client's own, and one of the proxy's.
    assert await status("10.0.0.7", [(header, "ann"), (header, "vic")]) == 400


@on_sqlite
async def test_roles_of_a_function(broker: SqlBroker) -> None:
    known = ProxyAuth("X-User", proxies=["10.0.0.0/8"], roles={"a": "viewer"}.get)
    async with client_of(broker.asgi(known), client=("10.1.2.3", 1)) as client:
        assert (await client.get("/csrf-token", headers={"X-User": "a"})).status_code == 200
        assert (await client.get("/csrf-token", headers={"X-User": "b"})).status_code == 401


@pytest.mark.parametrize(
    ("header", "proxies", "told"),
    [
        ("X-User", [], "needs the address"),
        ("X-User", ["10.0.0.300"], "is not an address"),
        ("", ["10.0.0.1"], "the name of a header"),
        ("X User", ["10.0.0.1"], "the name of a header"),
    ],
)
def test_a_proxy_is_checked(header: str, proxies: list[str], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        ProxyAuth(header, proxies=proxies, roles={})


@pytest.mark.attack(
    "guessing a secret by the time of the answer", "all are compared in constant time"
)
def test_secrets_are_compared_in_constant_time() -> None:
    compared = (is_token_valid, StoredPassword.matches, Csrf.check)
    for function in (*compared, Csrf.is_signed):
        assert "compare_digest" in inspect.getsource(function)
    assert "hmac.digest(self._key" in inspect.getsource(VerifiedSecrets)


@on_sqlite
async def test_wrong_tokens_are_counted_by_address_whatever_they_are_for(
    broker: SqlBroker,
) -> None:
    """Another queue brings no more guesses, and right tokens behind the same proxy still pass."""
    app = broker.asgi(logins(), queues=queues(), channels=channels(), max_failures=3)

    async def publish(queue: str, token: str) -> int:
        path = f"/v1/queues/{queue}/publish"
        found = await client.post(path, json={"body": 1}, headers=bearer(token))
        return found.status_code

    async def page(**others: str) -> int:
        found = await client.get(f"{JOBS}/queued-jobs", headers={**TOKENS, **others})
        return found.status_code

    async with client_of(app) as client:
        assert (await publish(QUEUE, PUBLISH), await page()) == (201, 200)
        guesses = [await publish(f"queue-{n}", f"guess-{n}") for n in range(5)]
        assert guesses == [403, 403, 403, 429, 429]
        # Nor does a channel bring more.
        assert await page(**{"X-Broker-Consumer-Token": "guess"}) == 429
        assert await publish(QUEUE, "guess") == 429
        # What was right before passes for its queue alone; what was never right waits.
        assert (await publish(QUEUE, PUBLISH), await page()) == (201, 200)
        assert await publish("queue-1", PUBLISH) == 429
        # People with passwords are not locked out by tokens.
        assert (await client.get("/csrf-token", auth=as_user("vic"))).status_code == 200
        # A token that was right once is one guess more, not an open door.
        path = f"{PATH}/tokens/publish"
        rotated = await client.put(path, data={"rotate": "true"}, auth=as_user("ann"))
        assert rotated.status_code == 200, rotated.text
        assert [await publish(QUEUE, PUBLISH) for _ in range(2)] == [403, 429]
        # A random token passes at once, though it was never seen here; a wrong one does not.
        right = rotated.json()["token"]
        assert await publish(QUEUE, f"{right[:-2]}-_") == 429
        assert [await publish(QUEUE, right), await publish("queue-1", right)] == [201, 429]
        made = await client.put(f"/channel/{CHANNEL}", data={"rotate": "true"}, auth=as_user("ann"))
        random = {"X-Broker-Channel-Token": made.json()["Token"]}
        path = f"/channel/{CHANNEL}/broadcast"
        assert (await client.post(path, content=b"1", headers=random)).status_code == 201
        # The other one of the two is of an administrator's choice: it may be guessed.
        assert await page(**random) == 429
        made = await client.put(JOBS, data={"type": "pull", "rotate": "true"}, auth=as_user("ann"))
        random["X-Broker-Consumer-Token"] = made.json()["Token"]
        assert await page(**random) == 200
        assert await publish(QUEUE, "guess") == 429


@pytest.mark.attack(
    "many wrong passwords and tokens at the same moment",
    "429 for all but as many as one after the other; the right one among them is not told",
)
@on_sqlite
async def test_guesses_at_once_are_limited_as_those_one_after_the_other(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them ask before the first is compared; then the right one is told nothing either."""
    compare = asyncio.Event()
    waiting = 0

    async def held() -> None:
        nonlocal waiting
        waiting += 1
        await compare.wait()

    async def user(connection: HTTPConnection) -> User | None:
        await held()
        given = parse_credentials(connection)
        return User("ann", "admin") if given == ("ann", "right") else None

    async def find_role(_queue: str, _role: QueueRole) -> list[RegisteredEndpoint | None]:
        await held()
        return known

    app = broker.asgi(user, queues=queues(), max_failures=3)
    async with client_of(app) as client:
        path = f"/v1/queues/{QUEUE}/publish"
        refused = await client.post(path, json={"body": 1}, headers=bearer("guess-0"))
        assert refused.status_code == 403
        tokens = app._service.queues().store.tokens  # type: ignore[misc]
        # Looked up before, so that they are compared in the order in which they came.
        known = await tokens.find_role(QUEUE, "publish")
        monkeypatch.setattr(tokens, "find_role", find_role)
        asked = [
            client.get("/csrf-token", auth=("ann", password))
            for password in (*("wrong" for _ in range(6)), "right")
        ]
        asked += [
            client.post(path, json={"body": 1}, headers=bearer(token))
            for token in (*(f"guess-{n}" for n in range(6)), PUBLISH)
        ]
        answers = asyncio.gather(*asked)
        await eventually(lambda: waiting == len(asked))
        compare.set()
        found = [answer.status_code for answer in await answers]
        assert found[:7] == [401, 401, 401, 429, 429, 429, 429]
        assert found[7:] == [403, 403, 429, 429, 429, 429, 429]


@on_sqlite
async def test_tokens_of_a_lock_out_cause_few_looks(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of random tokens asks the database so often in a minute, and no more."""
    monkeypatch.setattr(gate, "MAX_TOKEN_QUERIES", 30)
    app = broker.asgi(logins(), queues=queues(), max_failures=3)
    path = f"/v1/queues/{QUEUE}/publish"
    looks = 0

    async def publish(token: str) -> int:
        return (await client.post(path, json={"body": 1}, headers=bearer(token))).status_code

    async with client_of(app) as client:
        rotate = {"data": {"rotate": "true"}, "auth": as_user("ann")}
        made = await client.put(f"{PATH}/tokens/publish", **rotate)
        right = made.json()["token"]
        assert len(right) == RANDOM_TOKEN_LENGTH
        assert [await publish("guess") for _ in range(4)] == [403] * 3 + [429]
        tokens = app._service.queues().store.tokens  # type: ignore[misc]
        find_role = tokens.find_role

        async def counting(queue: str, role: QueueRole) -> list[RegisteredEndpoint | None]:
            nonlocal looks
            looks += 1
            return await find_role(queue, role)

        monkeypatch.setattr(tokens, "find_role", counting)
        assert await publish("an administrator's token") == 429
        assert looks == 0
        flood = [publish(create_token()) for _ in range(29)]
        assert set(await asyncio.gather(*flood)) == {429}
        assert looks == 29
        # It passes as long as tokens are looked up; then it is known, and passes in any case.
        assert await publish(right) == 201
        looks = 0
        assert {await publish(create_token()) for _ in range(10)} == {429}
        assert looks == 0
        assert await publish(right) == 201


def test_right_secrets_are_remembered_within_bounds() -> None:
    now = 0.0
    known = VerifiedSecrets(inf, lambda: now)
    for n in range(MAX_KEYS + 10):
        known.record("q", str(n))
    assert len(known._verified_at) == MAX_KEYS
    assert not known.has("q", "0")
    assert known.has("q", str(MAX_KEYS))
    # Neither the queue nor the tokens run into each other.
    known.record("a", "b", "c")
    assert not known.has("ab", "c")
    assert not known.has("a", "bc")
    known.record("a", "b", "c", is_right=False)
    assert not known.has("a", "b", "c")
    lately = VerifiedSecrets(10.0, lambda: now)
    lately.record("q", "1")
    now = 9.0
    assert lately.has("q", "1")
    now = 10.0
    assert not lately.has("q", "1")
