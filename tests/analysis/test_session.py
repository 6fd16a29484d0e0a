"""What does not fit is told before Spark starts."""

from pathlib import Path

import pytest

from aioshard.errors import MissingExtraError, SettingsError
from aioshard.spark import session


def java_that_says(directory: Path, version: str) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    program.chmod(0o755)
    return directory


@pytest.mark.parametrize("version", ['openjdk version "17.0.15" 2025-04-15', 'java version "21"'])
def test_java_that_fits(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, version)))

    session.check_java()


@pytest.mark.parametrize(
    ("version", "told"),
    [('java version "1.8.0_392"', "'Java 8'"), ('openjdk version "11.0.2"', "'Java 11'"), ("hello", "'hello'")],
)
def test_java_that_does_not(version: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_that_says(tmp_path, version)))

    with pytest.raises(SettingsError, match=f"{told}; Spark needs 17 or later"):
        session.check_java()


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(SettingsError, match="PATH has none: install a Java runtime"):
        session.check_java()


@pytest.mark.parametrize(
    ("package", "found", "told"),
    [
        ("pyspark", "4.1.0", "expected is 4.2 or later, before 4.3"),
        ("pandas", "3.1.0", "expected is a version before 3"),
    ],
)
def test_versions_that_do_not_fit(package: str, found: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        session, "version", lambda name: found if name == package else {"pyspark": "4.2.1"}.get(name, "2")
    )

    with pytest.raises(SettingsError, match=told):
        session.check_packages()


def test_a_missing_package_is_an_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(MissingExtraError, match=r"aioshard\[spark\]"):
        session.check_packages()


def test_speculation_is_refused() -> None:
    """A handler would run twice for the same record, at the same time."""
    with pytest.raises(SettingsError, match="twice at the same time"):
        session.local_session("local[1]", settings={"spark.speculation": "True"})
