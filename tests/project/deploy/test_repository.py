"""Repository files for GitHub and editors: workflows, templates, hooks and the development container."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.project.docs.pages import links
from tests.support.checkers import checked
from tests.support.paths import PROJECT
from tests.tools import prose

GITHUB = PROJECT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
COMMUNITY = [PROJECT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")]
VERBS = re.findall(r"^([a-z-]+):.*## ", (PROJECT / "Makefile").read_text(), re.MULTILINE)
EVERY_WORKFLOW = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


# Schemas -------------------------------------------------------------------------------------


def test_the_workflows_are_valid_and_every_job_has_a_timeout() -> None:
    assert [path.name for path in WORKFLOWS] == ["checks.yml", "release.yml"]
    checked("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    checked("check-jsonschema", "--builtin-schema", "custom.github-workflows-require-timeout", *WORKFLOWS)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("dependabot", ["dependabot.yml"]),
        ("github-issue-forms", ["ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/feature.yml"]),
        ("github-issue-config", ["ISSUE_TEMPLATE/config.yml"]),
    ],
)
def test_a_github_configuration_file_is_valid(schema: str, names: list[str]) -> None:
    checked("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *(GITHUB / name for name in names))


# Workflows -----------------------------------------------------------------------------------


@EVERY_WORKFLOW
def test_actions_are_pinned_and_jobs_get_the_least_permissions(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]

    assert [name for name in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+(\.\d+\.\d+)?", name)] == []
    assert loaded(workflow)["permissions"] == {"contents": "read"}


def test_only_the_jobs_that_sign_publish_and_announce_may_write() -> None:
    jobs = loaded(GITHUB / "workflows" / "release.yml")["jobs"]

    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "sign": {"attestations": "write", "id-token": "write"},
        "publish": {"id-token": "write"},
        "notes": {"contents": "write"},
    }


@pytest.mark.parametrize(("workflow", "job"), [("checks.yml", "fast"), ("release.yml", "test")])
def test_every_supported_python_is_tested(workflow: str, job: str) -> None:
    classifiers = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = [found[1] for line in classifiers if (found := re.search(r":: (3\.\d+)$", line))]

    assert loaded(GITHUB / "workflows" / workflow)["jobs"][job]["strategy"]["matrix"]["python"] == supported


def test_the_checks_run_every_test_lane() -> None:
    commands = "\n".join(step.get("run", "") for step in steps(GITHUB / "workflows" / "checks.yml"))

    assert {"check", "docs", "test-fast", "test-compiled", "test-older-broker", "test"} == set(
        re.findall(r"^make ([\w-]+)", commands, re.MULTILINE)
    )


# Hooks, container, community -------------------------------------------------------------------


def test_the_hooks_use_tools_that_make_installs() -> None:
    repositories = loaded(PROJECT / ".pre-commit-config.yaml")["repos"]

    assert [repository["repo"] for repository in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        assert hook["language"] == "system"
        program, *arguments = hook["entry"].split()
        assert (PROJECT / program).exists()
        if "-m" in arguments:
            assert (PROJECT / f"{arguments[-1].replace('.', '/')}.py").exists()


def test_the_dev_container_has_the_tools_the_tests_need() -> None:
    container = json.loads((PROJECT / ".devcontainer" / "devcontainer.json").read_text())

    assert re.search(r"/python:.*3\.1[1-4]", container["image"])
    assert container["features"]["ghcr.io/devcontainers/features/java:1"] == {"version": "17", "installMaven": "true"}
    assert set(container["postCreateCommand"].split()[1:]) <= set(VERBS)


@pytest.mark.parametrize("page", COMMUNITY, ids=lambda page: page.name)
def test_a_page_names_existing_make_targets_and_files(page: Path) -> None:
    text = page.read_text()

    assert set(re.findall(r"`make ([a-z-]+)", text)) - set(VERBS) == set()
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", text) if not (PROJECT / name).exists()] == []
    assert [link.file for link in links(page) if not (PROJECT / link.file).exists()] == []
    assert "@" not in re.sub(r"```.*?```|`[^`]+`", "", text, flags=re.DOTALL), "an address that nobody may read"


@pytest.mark.parametrize("page", COMMUNITY, ids=lambda page: page.name)
def test_a_page_is_plain_english(page: Path) -> None:
    assert list(prose.findings(page)) == []


# The check of the prose ------------------------------------------------------------------------

MARKDOWN = """\
# What is it?

Records with the same key stay in order. What others
have is listed below: `3 record(s)`.

```text
Whoever reads this, 3 record(s) are in hand.
```

* It is no record.
* There is no token, and it is no longer needed.
"""

PYTHON = '''\
"""Whoever has this."""
value = "3 record(s)"  # fixed by hand
'''


def test_phrases_are_found_with_their_line_outside_code(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text(MARKDOWN)
    module.write_text(PYTHON)

    def places(path: Path) -> list[tuple[str, str]]:
        return [(line.split(":")[1], line.rpartition(": ")[2]) for line in prose.findings(path)]

    assert places(page) == [("3", "begin with the subject"), ("10", "write 'is not a …' or 'unknown …'")]
    assert places(module) == [
        ("1", "begin with the subject"),
        ("2", "write 'manually'"),
    ]


def test_the_check_prints_its_findings_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Partitions are in hand.\n")

    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:1: …Partitions are in hand.…: write 'in flight'\n"
    page.write_text("Partitions are in flight.\n")
    assert prose.main([str(page)]) == 0
    assert capsys.readouterr().out == ""
