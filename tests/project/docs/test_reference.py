"""The reference lists every public name. The built pages are compared with the members too, in `test_site.py`."""

import re

from aioshard import App
from tests.project.docs.public import INTERNAL, exported, public_names
from tests.project.docs.tables import DOCS

PAGES = sorted((DOCS / "reference").glob("*.md"))
DIRECTIVES = {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}


def test_every_exported_name_is_documented() -> None:
    assert exported() - DIRECTIVES == set()


def test_every_method_of_an_app_is_documented() -> None:
    methods = {name for name in public_names() if name.startswith("aioshard.App.")}

    assert methods - DIRECTIVES == {"aioshard.App.consume", "aioshard.App.middleware"}
    page = (DOCS / "reference" / "app.md").read_text()
    assert "inherited_members: [consume, middleware]" in page


def test_an_omitted_name_exists_and_is_not_listed() -> None:
    assert INTERNAL.keys() & DIRECTIVES == set()
    assert all(hasattr(App, name.removeprefix("aioshard.App.")) for name in INTERNAL)


def test_every_exception_is_on_the_errors_page() -> None:
    assert "aioshard.errors" in DIRECTIVES


def test_the_pages_are_in_the_overview() -> None:
    overview = (DOCS / "reference" / "index.md").read_text()

    assert set(re.findall(r"\]\(([\w-]+\.md)\)", overview)) == {page.name for page in PAGES} - {"index.md"}
