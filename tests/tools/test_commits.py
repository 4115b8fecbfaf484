"""Subjects of commits are short and imperative, and the check finds those that are not."""

import subprocess
from pathlib import Path

import pytest

from tools import commits


@pytest.mark.parametrize(
    "subject",
    [
        "Release expired leases",
        "Pass options by name",
        "Process two batches at once",
        "Embed the schema",
        "A" * commits.MAX_SUBJECT,
    ],
)
def test_a_short_imperative_subject_is_accepted(subject: str) -> None:
    assert commits.find_mistakes(subject) == []


@pytest.mark.parametrize(
    ("subject", "mistake"),
    [
        ("A" * (commits.MAX_SUBJECT + 1), "has 73 characters, at most 72 are allowed"),
        ("release expired leases", "must begin with a capital letter"),
        ("Released expired leases", "not 'Released'"),
        ("Releasing expired leases", "not 'Releasing'"),
        ("Releases expired leases", "not 'Releases'"),
        ("Release expired leases.", "must not end with a full stop"),
        ("", "must begin with a capital letter"),
    ],
)
def test_a_mistake_is_found(subject: str, mistake: str) -> None:
    (text,) = commits.find_mistakes(subject)
    assert mistake in text


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commits, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for subject in ("Wrote before the rule", "Added a file", "Add a file"):
        author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", *author, "commit", "-q", "--allow-empty", "-m", subject]
        subprocess.run(command, cwd=tmp_path, check=True)
    return tmp_path


def test_only_new_commits_are_checked(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commits.main(["--since", "HEAD~2"]) == 1
    printed = capsys.readouterr().out
    assert "'Added a file' must begin with an imperative" in printed
    assert "Wrote" not in printed
    assert commits.main(["--since", "HEAD~1"]) == 0
    assert capsys.readouterr().out == ""


def test_a_shallow_clone_is_checked_as_far_as_it_goes(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commits.main(["--since", "0" * 40]) == 1
    assert "'Wrote before the rule'" not in capsys.readouterr().out


def test_a_folder_without_history_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="cannot read the commits"):
        commits.main([])
