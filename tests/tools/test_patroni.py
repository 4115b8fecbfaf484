"""The private pair that Patroni keeps: its configuration, and how its roles are seen.

`just test-failover` starts it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tools.patroni import Member, Patroni, configuration, etcd_command, haproxy_configuration
from tools.private import CannotStartError

Asked = tuple[str, str]
SWITCHOVER: Asked = ("POST", "/switchover")


class Fake(Member):
    """A member that is not started; `answers` are those of its Patroni."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder, lambda: None, Path("/programs"))
        self.answers: dict[Asked, tuple[int, str]] = {}
        self.asked: list[Asked] = []
        self.successor: Fake | None = None
        """Gets the answers when a switchover was asked for `ends_after` times."""
        self.ends_after = 0

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 5.0
    ) -> tuple[int, str]:
        self.asked.append((method, path))
        if self.successor is not None and self.asked.count(SWITCHOVER) == self.ends_after:
            self.successor.answers.update(self.answers)
            self.answers.clear()
        return self.answers.get((method, path), (503, "no"))


@pytest.fixture
def members(tmp_path: Path) -> tuple[Fake, Fake]:
    return Fake(tmp_path / "first"), Fake(tmp_path / "second")


@pytest.fixture
def servers(members: tuple[Fake, Fake]) -> Patroni:
    return Patroni(members, etcd=1, haproxy=2, synchronous=False)


@pytest.mark.parametrize("synchronous", [False, True])
def test_patroni_takes_the_times_as_they_are(
    members: tuple[Fake, Fake], *, synchronous: bool
) -> None:
    settings = json.loads(json.dumps(configuration(members[0], 2379, synchronous=synchronous)))
    times = settings["bootstrap"]["dcs"]
    # It raises a shorter ttl, and lowers the others to what goes with it.
    assert times["ttl"] >= 20
    assert times["loop_wait"] + 2 * times["retry_timeout"] <= times["ttl"]
    assert times["synchronous_mode"] is synchronous


def test_each_member_has_addresses_and_files_of_its_own(members: tuple[Fake, Fake]) -> None:
    first, second = (configuration(member, 2379, synchronous=False) for member in members)
    for section, field in (
        ("restapi", "listen"),
        ("postgresql", "listen"),
        ("postgresql", "data_dir"),
        ("postgresql", "pgpass"),
    ):
        assert first[section][field] != second[section][field]
    assert first["postgresql"]["connect_address"] == f"127.0.0.1:{members[0].port}"
    assert first["etcd3"] == second["etcd3"] == {"hosts": "127.0.0.1:2379"}


def test_haproxy_asks_the_patroni_of_each_server(members: tuple[Fake, Fake]) -> None:
    lines = [line.strip() for line in haproxy_configuration(5000, members).splitlines()]
    assert "bind 127.0.0.1:5000" in lines
    for each in members:
        assert f"server {each.name} 127.0.0.1:{each.port} check port {each.rest_port}" in lines
    # Otherwise clients stay with a server that is not the primary any more, or without one.
    assert "retries 0" in lines
    assert any("on-marked-down shutdown-sessions" in line for line in lines)


def test_etcd_is_reached_where_patroni_looks_for_it(tmp_path: Path) -> None:
    command = etcd_command("etcd", tmp_path, 2379)
    assert "--listen-client-urls=http://127.0.0.1:2379" in command
    assert "--advertise-client-urls=http://127.0.0.1:2379" in command


def test_the_primary_is_the_one_that_has_the_lock(
    servers: Patroni, members: tuple[Fake, Fake]
) -> None:
    first, second = members
    assert not servers.look()
    assert servers.primary is first
    second.answers["OPTIONS", "/primary"] = 200, "{}"
    assert servers.look()
    assert (servers.primary, servers.standby) == (second, first)


def test_a_switchover_is_asked_for_until_it_is_done(
    servers: Patroni, members: tuple[Fake, Fake]
) -> None:
    first, second = members
    first.answers["OPTIONS", "/primary"] = 200, "{}"
    first.ends_after = 2
    first.successor = second
    servers.switch_over()
    assert servers.primary is second
    assert first.asked.count(SWITCHOVER) >= 2


def test_a_switchover_that_is_refused_says_why(
    servers: Patroni, members: tuple[Fake, Fake]
) -> None:
    members[0].answers[SWITCHOVER] = 412, "no good candidates"
    with pytest.raises(CannotStartError, match="no switchover: no good candidates: first"):
        servers.switch_over(patience=1.0)
