"""The text of a metrics scrape, rendered quickly even with thousands of partitions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from aioshard.core.histogram import HistogramCounts
from aioshard.telemetry.metric_table import METRICS

__all__ = ["Collected", "Labels", "SeriesFamily", "Values", "encode"]

Labels = tuple[str, ...]
"""Label values of one series, in the order of the metric table; `group` comes first."""

_SUFFIXES: Final = {"counter": "_total", "info": "_info"}
_EOF = b"# EOF\n"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class SeriesFamily(Metric):
    """One aioshard metric with its series: a regular `Metric`, but `encode` renders it without an object per series."""

    def __init__(
        self,
        name: str,
        numbers: Mapping[Labels, float] | None = None,
        histograms: Mapping[Labels, HistogramCounts] | None = None,
    ) -> None:
        self._numbers = numbers or {}
        self._histograms = histograms or {}
        self._names = ("group", *METRICS[name].labels)
        super().__init__(name, METRICS[name].help, METRICS[name].kind)

    @property
    def samples(self) -> list[Sample]:
        """Return one sample per series, as prometheus_client expects."""
        full = self.name + _SUFFIXES.get(self.type, "")
        found = [Sample(full, self._named(labels), value) for labels, value in self._numbers.items()]
        for labels, counts in self._histograms.items():
            named = self._named(labels)
            found += [Sample(f"{self.name}_bucket", {**named, "le": le}, n) for le, n in _buckets(counts)]
            found.append(Sample(f"{self.name}_sum", named, counts.total))
            found.append(Sample(f"{self.name}_count", named, counts.count))
        return found

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """Ignore the empty list that the base class assigns."""

    def _named(self, labels: Labels) -> dict[str, str]:
        return dict(zip(self._names, labels, strict=True))

    def lines(self, texts: dict[tuple[Labels, Labels], str], *, open_metrics: bool) -> Iterator[str]:
        """Yield the metric as text.

        Args:
            texts: Cache of rendered label names and values, which many metrics share.
            open_metrics: True for the OpenMetrics format, whose headings name counters and infos differently.
        """
        full = self.name + _SUFFIXES.get(self.type, "")
        kind = "gauge" if self.type == "info" and not open_metrics else self.type
        heading = self.name if open_metrics else full
        yield f"# HELP {heading} {self.documentation.translate(_ESCAPES) if open_metrics else self.documentation}\n"
        yield f"# TYPE {heading} {kind}\n"
        for labels, value in self._numbers.items():
            text = texts.get((self._names, labels)) or self._text(texts, labels)
            yield f"{full}{{{text}}} {float(value)}\n"
        for labels, counts in self._histograms.items():
            text = self._text(texts, labels)
            for le, count in _buckets(counts):
                yield f'{self.name}_bucket{{{text},le="{le}"}} {float(count)}\n'
            yield f"{self.name}_sum{{{text}}} {counts.total}\n"
            yield f"{self.name}_count{{{text}}} {float(counts.count)}\n"

    def _text(self, texts: dict[tuple[Labels, Labels], str], labels: Labels) -> str:
        pairs = sorted(zip(self._names, labels, strict=True))
        text = texts[self._names, labels] = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
        return text


def _buckets(counts: HistogramCounts) -> list[tuple[str, int]]:
    """Return the cumulative counts, each with its bound as text."""
    return list(zip([*map(str, counts.bounds), "+Inf"], accumulate(counts.counts), strict=True))


class Values:
    """The values of one scrape.

    Series that occur twice, from handlers with the same name, are summed: Prometheus rejects a page with duplicates.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self._histograms: dict[str, dict[Labels, HistogramCounts]] = {name: {} for name in METRICS}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add a number."""
        series = self._numbers[name]
        series[labels] = series.get(labels, 0) + value

    def series(self, name: str) -> dict[Labels, float]:
        """Return the series of a metric; write to them directly if there are many."""
        return self._numbers[name]

    def add_histogram(self, name: str, labels: Labels, counts: HistogramCounts | None) -> None:
        """Add a histogram; None is ignored."""
        if counts is None:
            return
        series = self._histograms[name]
        before = series.get(labels)
        if before is not None:
            summed = tuple(map(sum, zip(before.counts, counts.counts, strict=True)))
            counts = HistogramCounts(counts.bounds, summed, before.total + counts.total)
        series[labels] = counts

    def families(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for name in METRICS:
            yield SeriesFamily(name, self._numbers[name], self._histograms[name])


class Collected(Collector):
    """A collector for metrics that were already gathered, for use with an encoder."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics


def encode(registry: Collector, accept: str = "") -> tuple[bytes, str]:
    """Render the metrics page: the same as prometheus_client would, in a fraction of the time.

    Args:
        registry: The metrics to render.
        accept: The `Accept` header of the scraper.

    Returns:
        The page and its content type.
    """
    encoder: Callable[[Any], bytes]
    encoder, content_type = choose_encoder(accept)
    open_metrics = content_type.startswith("application/openmetrics-text")
    ours: list[SeriesFamily] = []
    others: list[Metric] = []
    for metric in registry.collect():
        if isinstance(metric, SeriesFamily):
            ours.append(metric)
        else:
            others.append(metric)
    texts: dict[tuple[Labels, Labels], str] = {}
    page = "".join(line for family in ours for line in family.lines(texts, open_metrics=open_metrics)).encode()
    rest = encoder(Collected(others))
    if open_metrics:
        return rest.removesuffix(_EOF) + page + _EOF, content_type
    return rest + page, content_type
