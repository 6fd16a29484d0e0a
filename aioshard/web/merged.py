"""Merge the metrics of several processes into one exposition: every series gets the label `worker`.

It works on text: the parser of prometheus_client creates an object for each sample, and takes more than ten times as
long.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["LABEL", "Family", "labelled", "merged"]

LABEL = "worker"

_EOF = "# EOF"
_HEADINGS = ("TYPE", "HELP", "UNIT")
_TAKEN = re.compile(rf'(^|,){LABEL}="')
"""Matches the label in the text after a brace; within a value its quote would be escaped."""


@dataclasses.dataclass(slots=True)
class Family:
    """The lines of one metric."""

    type: str = "untyped"
    headings: list[str] = dataclasses.field(default_factory=list)
    samples: list[str] = dataclasses.field(default_factory=list)


def labelled(text: str, worker: str | None) -> dict[str, Family]:
    r"""Return the metrics of an exposition by name, with the label `worker` on every series.

    An existing label of that name becomes `exported_worker`, as in Prometheus.

    Args:
        text: Output of prometheus_client, in the OpenMetrics format or the older one, with names in the plain
            character set: each sample follows the headings of its metric.
        worker: The label's value; None leaves the series unchanged.

    Raises:
        ValueError: The text does not have this format.

    Example:
        >>> labelled('# TYPE orders counter\norders_total{shop="a"} 3.0\n# EOF\n', "1")["orders"].samples
        ['orders_total{worker="1",shop="a"} 3.0']
    """
    families: dict[str, Family] = {}
    name, family = "", None
    for line in _lines(text):
        if line.startswith("# "):
            _, kind, name, *rest = [*line.split(" ", 3), "", ""]
            if kind not in _HEADINGS:
                raise ValueError(f"a heading was expected, and it is {line[:80]!r}")
            family = families.setdefault(name, Family())
            family.headings.append(line)
            if kind == "TYPE":
                family.type = rest[0]
        elif family is None or not line.startswith(name):
            raise ValueError(f"a sample of metric {name!r} was expected, and it is {line[:80]!r}")
        else:
            family.samples.append(_labelled(line, worker))
    if not families:
        raise ValueError("it has no metric")
    return families


def _lines(text: str) -> Iterator[str]:
    """Return the lines without empty ones and the end marker; reject a truncated text."""
    if not text.endswith("\n"):
        raise ValueError("the last line breaks off")
    return (line for line in text.split("\n") if line and line != _EOF)


def _labelled(line: str, worker: str | None) -> str:
    float(line.rpartition(" ")[2])  # a value, or its timestamp
    if worker is None:
        return line
    space, brace = line.find(" "), line.find("{")
    if not 0 <= brace < space:
        return f'{line[:space]}{{{LABEL}="{worker}"}}{line[space:]}'
    labels = line[brace + 1 :]
    if f'{LABEL}="' in labels:
        labels = _TAKEN.sub(rf'\1exported_{LABEL}="', labels, count=1)
    separator = "" if labels.startswith("}") else ","
    return f'{line[:brace]}{{{LABEL}="{worker}"{separator}{labels}'


def merged(exposed: Iterable[Mapping[str, Family]], *, open_metrics: bool) -> str:
    """Merge several expositions into one: the headings of a metric appear once, as in the first exposition.

    If a worker exposes another type under the same name, as during a manual rollout of a new version, its samples are
    left out: a metric has one type, and a mixture would invalidate the whole scrape.

    Args:
        exposed: The expositions, all in the same format.
        open_metrics: Whether that format is OpenMetrics, which has an end marker.
    """
    families: dict[str, tuple[Family, list[str]]] = {}
    for one in exposed:
        for name, family in one.items():
            known, samples = families.setdefault(name, (family, []))
            if known.type == family.type:
                samples += family.samples
    lines = [line for known, samples in families.values() for line in (*known.headings, *samples)]
    return "\n".join([*lines, *([_EOF] if open_metrics else []), ""])
