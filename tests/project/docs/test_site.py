"""The site builds without a warning and is complete."""

import re
from pathlib import Path

import pytest

from tests.project.docs.public import public_names
from tests.project.docs.tables import named_tests
from tests.support.paths import PROJECT


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_site_builds_completely(site: Path) -> None:
    """A plugin that the builder does not know is ignored in silence: pages would be empty then."""
    check_reference(site)
    check_examples_are_code(site)
    check_evidence(site)
    assert "Keep a Changelog" in text_of(site, "changelog")


def test_both_builders_accept_the_configuration() -> None:
    """MkDocs and Zensical; the latter ignores in silence a plugin that it does not know."""
    text = (PROJECT / "mkdocs.yml").read_text()

    plugins = re.findall(
        r"^  - (\w+)", text.partition("\nplugins:\n")[2].partition("\nmarkdown_extensions:")[0], re.MULTILINE
    )
    extensions = re.findall(r"^  - ([\w.]+)", text.partition("\nmarkdown_extensions:\n")[2], re.MULTILINE)
    assert plugins == ["search", "mkdocstrings"]
    assert [
        name for name in extensions if not re.match(r"(admonition|attr_list|tables|toc|pymdownx\.\w+)$", name)
    ] == []
    assert set(re.findall(r"^(\w+):", text, re.MULTILINE)) == {
        "site_name",
        "site_description",
        "strict",
        "theme",
        "extra_css",
        "nav",
        "plugins",
        "markdown_extensions",
    }


def test_the_navigation_has_few_sections_and_short_lists() -> None:
    navigation = (PROJECT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nplugins:")[0]
    sections = re.findall(r"^  - (.+):$", navigation, re.MULTILINE)
    pages = [len(re.findall(r"\.md$", part, re.MULTILINE)) for part in re.split(r"(?m)^  - ", navigation)[1:]]

    assert sections[0] == "Start"
    assert sections[-1] == "The project"
    assert 8 <= len(sections) <= 12
    assert max(pages) <= 10


def text_of(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text()


def ids(site: Path, page: str) -> set[str]:
    return _ids(text_of(site, page))


def _ids(text: str) -> set[str]:
    return set(re.findall(r'id="([\w.]+)"', text))


def check_reference(site: Path) -> None:
    shown = {name for page in sorted((site / "reference").glob("**/index.html")) for name in _ids(page.read_text())}
    assert shown
    assert public_names() - shown == set()


def check_examples_are_code(site: Path) -> None:
    page = text_of(site, "reference/app")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in page
    assert "<blockquote>" not in page, "an example of a docstring was taken for prose"


def check_evidence(site: Path) -> None:
    named = {name for names in named_tests().values() for name in names}
    assert named - ids(site, "evidence") == set()
    assert text_of(site, "evidence").count("Source code in <code>tests/") >= len(named)
