"""Missing requirements are reported before Spark starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioshard.errors import MissingExtraError, SettingsError
from aioshard.spark import session


def test_missing_java_is_a_clear_error(tmp_path: Path) -> None:
    script = (
        "from aioshard.errors import SettingsError\n"
        "from aioshard.spark.session import local_session\n"
        "try:\n    local_session('local[1]')\n"
        "except SettingsError as error:\n    print(error)\n"
    )
    environment = os.environ | {"JAVA_HOME": str(tmp_path)}

    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert "`java -version` is 17 or later" in ended.stdout


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(MissingExtraError, match=r"aioshard\[spark\]"):
        session.check_packages()


def test_speculation_is_refused() -> None:
    """A handler would run twice for the same record, at the same time."""
    with pytest.raises(SettingsError, match="twice at the same time"):
        session.local_session("local[1]", settings={"spark.speculation": "True"})
