"""The wheel: size, contents, metadata, and the quick start in a clean environment."""

import email.message
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hatch_build import LINK, absolute_links, repository_url
from tests.support.checkers import checked
from tests.support.paths import PROJECT
from tests.support.requirements import skip_or_fail
from tests.tools.compiled import modules
from tests.tools.quick_start import quick_start

LARGEST = 950_000
REPOSITORY = "https://git.example/someone/aioshard"
IN_A_WORKFLOW = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "someone/aioshard"}
ON_A_TAG = {**IN_A_WORKFLOW, "GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v0.1.0"}
INSTALLING = 300.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", PROJECT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", PROJECT, tmp_path_factory.mktemp("sdist"), **ON_A_TAG)


def build(hook: str, source: Path, directory: Path, **variables: str) -> Path:
    """Builds with the backend itself, as `pip` does, but without fetching it again."""
    code = f"import sys, hatchling.build; print(hatchling.build.{hook}(sys.argv[1]))"
    kept = {name: value for name, value in os.environ.items() if not re.match("GITHUB_|AIOSHARD_COMPILE", name)}
    built = subprocess.run(
        [sys.executable, "-c", code, directory],
        cwd=source,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return directory / built.stdout.splitlines()[-1]


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as opened:
        text = opened.read("aioshard-0.1.0.dist-info/METADATA").decode()
    return email.parser.Parser().parsestr(text)


def relative_links(text: str) -> list[str]:
    return [found["target"] for found in LINK.finditer(re.sub(r"(?ms)^```.*?^```|`[^`\n]+`", "", text))]


def test_the_wheel_has_only_the_packages(wheel: Path) -> None:
    files = [file for package in ("aioshard", "pyspark_aioshard") for file in (PROJECT / package).rglob("*")]
    expected = {str(file.relative_to(PROJECT)) for file in files if file.is_file() and file.suffix != ".pyc"}

    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "aioshard/py.typed" in names
    assert "aioshard-0.1.0.dist-info/licenses/LICENSE" in names
    assert {str(path) for path in modules()} <= names
    assert wheel.name == "aioshard-0.1.0-py3-none-any.whl"
    assert wheel.stat().st_size <= LARGEST


def test_the_metadata_names_the_project_extras_and_scripts(wheel: Path) -> None:
    found = metadata(wheel)

    assert (found["Name"], found["Version"], found["Requires-Python"]) == ("aioshard", "0.1.0", ">=3.11")
    assert (found["License-Expression"], found["License-File"]) == ("Apache-2.0", "LICENSE")
    assert {"broker", "web", "spark", "all"} <= set(found.get_all("Provides-Extra", []))
    required = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) == 9
    with zipfile.ZipFile(wheel) as opened:
        programs = opened.read("aioshard-0.1.0.dist-info/entry_points.txt").decode()
    assert "aioshard = aioshard.cli.main:main" in programs
    assert "[pytest11]" in programs


def test_outside_a_workflow_the_readme_is_unchanged_and_no_url_is_invented(wheel: Path) -> None:
    found = metadata(wheel)

    assert found.get_payload() == (PROJECT / "README.md").read_text()
    assert found["Description-Content-Type"] == "text/markdown"
    assert found["Project-URL"] is None


def test_in_a_workflow_the_metadata_has_absolute_urls(tmp_path: Path) -> None:
    found = metadata(build("build_wheel", PROJECT, tmp_path, **IN_A_WORKFLOW))

    urls = dict(line.split(", ") for line in found.get_all("Project-URL", []))
    assert urls == {
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/HEAD/docs/index.md",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    text = str(found.get_payload())
    assert f"]({REPOSITORY}/blob/HEAD/LICENSE)" in text
    assert relative_links((PROJECT / "README.md").read_text())
    assert relative_links(text) == []


def test_a_wheel_built_from_the_sdist_keeps_its_urls(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")

    found = metadata(build("build_wheel", tmp_path / "aioshard-0.1.0", tmp_path))

    assert f"Changelog, {REPOSITORY}/blob/v0.1.0/CHANGELOG.md" in found.get_all("Project-URL", [])
    assert relative_links(str(found.get_payload())) == []


def test_an_editable_install_gets_its_metadata_with_and_without_the_variables(tmp_path: Path) -> None:
    for number, variables in enumerate(({}, IN_A_WORKFLOW)):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert build("prepare_metadata_for_build_editable", PROJECT, directory, **variables).exists()


def test_twine_check_passes(wheel: Path, sdist: Path) -> None:
    checked("twine", "check", "--strict", wheel, sdist)


def test_links_become_absolute_while_code_and_anchors_stay(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    text = """\
[a page](docs/index.md#why "why"), [a folder](examples), ![a picture](./docs/a.png) and `[code](docs/x.md)`
[![a badge](docs/b.svg)](LICENSE) <img src="docs/c.webp" alt=""> [a place](#here) [elsewhere](https://example.org/x.md)
[named]: docs/named.md

```markdown
[a block](docs/y.md)
```
[after](z.md)
"""

    assert (
        absolute_links(text, REPOSITORY, "v1", tmp_path)
        == f"""\
[a page]({REPOSITORY}/blob/v1/docs/index.md#why "why"), [a folder]({REPOSITORY}/tree/v1/examples), \
![a picture]({REPOSITORY}/raw/v1/docs/a.png) and `[code](docs/x.md)`
[![a badge]({REPOSITORY}/raw/v1/docs/b.svg)]({REPOSITORY}/blob/v1/LICENSE) \
<img src="{REPOSITORY}/raw/v1/docs/c.webp" alt=""> [a place](#here) [elsewhere](https://example.org/x.md)
[named]: {REPOSITORY}/blob/v1/docs/named.md

```markdown
[a block](docs/y.md)
```
[after]({REPOSITORY}/blob/v1/z.md)
"""
    )


def test_a_partial_repository_url_is_empty() -> None:
    assert repository_url({"GITHUB_REPOSITORY": "someone/aioshard"}) == ""
    assert repository_url({"GITHUB_SERVER_URL": "https://git.example/", **IN_A_WORKFLOW}) == REPOSITORY


@pytest.mark.chaos
@pytest.mark.timeout(INSTALLING + 120)
def test_the_quick_start_runs_from_the_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    installed = subprocess.run(
        [programs / "python", "-m", "pip", "install", "--no-compile", f"{wheel}[broker]"],
        capture_output=True,
        text=True,
        timeout=INSTALLING,
        check=False,
    )
    if re.search(r"No matching distribution|Connection(?:Error| broken)|Max retries", installed.stderr):
        skip_or_fail("package index", installed.stderr[-300:])
    assert installed.returncode == 0, installed.stdout + installed.stderr

    assert "b'alice' 0" in quick_start(programs)
