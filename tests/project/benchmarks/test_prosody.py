"""Prosody as a contestant: its environment is made once, and it is left out where that is impossible."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.peers import prosody
from benchmarks.peers.prosody import PROSODY, ProsodyUnavailableError, find_prosody
from benchmarks.stage import Contestant, Stage
from tests.support.cluster import KafkaCluster


class Commands:
    """Takes the place of `subprocess.run`."""

    def __init__(self) -> None:
        self.ran: list[Sequence[str]] = []
        self.code = 0

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.ran.append(command)
        return subprocess.CompletedProcess(command, self.code, "", "no matching distribution")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """The commands that make the environment, which are not run."""
    commands = Commands()
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("a-package==1\n")
    (tmp_path / "environment").mkdir()
    monkeypatch.setattr(prosody, "_REQUIREMENTS", requirements)
    monkeypatch.setattr(prosody, "_ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(prosody, "_LOCK", tmp_path / "lock")
    monkeypatch.setattr("subprocess.run", commands)
    return commands


def test_the_environment_is_made_once(commands: Commands, tmp_path: Path) -> None:
    python = find_prosody()

    assert python == tmp_path / "environment" / "bin" / "python"
    assert [command[2] for command in commands.ran] == ["venv", "pip"]
    assert str(tmp_path / "requirements.txt") in commands.ran[1]
    assert find_prosody() == python
    assert len(commands.ran) == 2


def test_other_versions_make_it_anew(commands: Commands, tmp_path: Path) -> None:
    find_prosody()
    (tmp_path / "requirements.txt").write_text("a-package==2\n")

    find_prosody()

    assert [command[2] for command in commands.ran] == ["venv", "pip"] * 2


def test_a_failure_is_reported_and_tried_again(commands: Commands) -> None:
    commands.code = 1
    with pytest.raises(ProsodyUnavailableError, match="no matching distribution"):
        find_prosody()
    commands.code = 0

    find_prosody()

    assert [command[2] for command in commands.ran] == ["venv", "venv", "pip"]


def test_a_failed_change_leaves_no_environment(commands: Commands, tmp_path: Path) -> None:
    find_prosody()
    before = (tmp_path / "requirements.txt").read_text()
    (tmp_path / "requirements.txt").write_text("a-package==2\n")
    commands.code = 1
    with pytest.raises(ProsodyUnavailableError):
        find_prosody()
    (tmp_path / "requirements.txt").write_text(before)

    with pytest.raises(ProsodyUnavailableError):
        find_prosody()


def test_prosody_is_left_out_where_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ProsodyUnavailableError("no matching distribution")

    monkeypatch.setattr("benchmarks.stage.find_prosody", missing)
    stage = Stage(KafkaCluster("nowhere:1"), quick=True, progress=Console(quiet=True))

    assert stage.lineup([Contestant("aioshard"), Contestant(PROSODY, prosody=True)], []) == [Contestant("aioshard")]
