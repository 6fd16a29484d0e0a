"""The HTML page of reports: plots are embedded, nothing is fetched, with a dark mode and a layout for phones."""

import html
import importlib.util
from collections.abc import Iterable, Sequence

from aioshard.errors import MissingExtraError

__all__ = ["check_plots", "escaped", "page_of", "paragraphs", "table", "tiles"]


def check_plots() -> None:
    """Check that plots can be drawn before any slow work starts.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("a report with plots", "report")


def page_of(title: str, sections: Iterable[str]) -> str:
    """Return a complete page; its only URLs are the names of XML namespaces.

    Args:
        title: Plain text.
        sections: HTML.
    """
    return _PAGE.format(title=escaped(title), body="\n".join(sections))


def paragraphs(told: Iterable[str]) -> str:
    """Return one paragraph per sentence."""
    return "\n".join(f"<p>{escaped(one)}</p>" for one in told)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls on its own if the page is too narrow.

    Args:
        headings: Column headings.
        rows: Cells as plain text.
    """
    head = "".join(f"<th>{escaped(one)}</th>" for one in headings)
    cells = ("".join(f"<td>{escaped(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Render key figures, pairs of name and value, as tiles for the top of a page."""
    return '<div class="tiles">' + "".join(f"<div><b>{value}</b>{name}</div>" for name, value in figures) + "</div>"


def escaped(text: str) -> str:
    """Escape text for HTML and make it printable; keys can contain anything."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return html.escape(shown)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --text: #1c2430; --faint: #97a1ae; --page: #ffffff; --box: #f2f4f7; --one: #2f6fde; --two: #e07b1f;
  --three: #1f9d6b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e4e8ee; --faint: #707b8a; --page: #14181e; --box: #1e242c; --one: #6da2ff; --two: #f5a24f;
    --three: #4fcf9a; }}
}}
body {{ margin: 0 auto; max-width: 56rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; margin: 0.5rem 0; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.75rem; }}
.tiles div {{ background: var(--box); border-radius: 0.5rem; padding: 0.75rem; }}
.tiles b {{ display: block; font-size: 1.3rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.25rem 1rem 0.25rem 0; white-space: nowrap; }}
tbody tr {{ border-top: 1px solid var(--box); }}
svg {{ display: block; width: 100%; height: auto; max-width: 44rem; margin: 0.75rem 0; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
