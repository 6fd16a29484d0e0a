"""Metrics of several processes as those of one."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from aioshard.web.merged import labelled, merged

FORMATS: dict[str, tuple[Callable[[Any], bytes], Callable[[str], Iterable[Metric]]]] = {
    "openmetrics": (generate_openmetrics, parse_openmetrics),
    "text": (generate_latest, parse_text),
}


def exposed(orders: float, kind: str = "openmetrics", **labels: str) -> str:
    """What a process with one metric of each type exposes."""
    registry = CollectorRegistry()
    counter = Counter("orders", "Orders taken in.", sorted(labels), registry=registry)
    (counter.labels(**labels) if labels else counter).inc(orders)
    Gauge("room", 'Room left, in "boxes".\nA second line.', registry=registry).set(orders / 2)
    Histogram("weight", "Of a box.", buckets=(1, 2), registry=registry).observe(1.5, {"trace": "a b"})
    Info("build", "What runs.", registry=registry).info({"version": "1"})
    return FORMATS[kind][0](registry).decode()


def together(*texts: str, kind: str = "openmetrics") -> str:
    pages = [labelled(text, str(number)) for number, text in enumerate(texts)]
    return merged(pages, open_metrics=kind == "openmetrics")


def sample(text: str, name: str, kind: str = "openmetrics", **labels: str) -> float | None:
    """Read by the library's parser: that of OpenMetrics refuses a family, and a series, that comes twice."""
    found = [one for family in FORMATS[kind][1](text) for one in family.samples]
    values = [one.value for one in found if (one.name, one.labels) == (name, labels)]
    assert len(values) <= 1
    return values[0] if values else None


@pytest.mark.parametrize("kind", FORMATS)
def test_every_series_gets_the_label_and_each_family_is_told_once(kind: str) -> None:
    text = together(exposed(1, kind), exposed(5, kind), kind=kind)

    assert sample(text, "orders_total", kind, worker="0") == 1
    assert sample(text, "orders_total", kind, worker="1") == 5
    assert sample(text, "weight_bucket", kind, le="2.0", worker="1") == 1
    assert sample(text, "build_info", kind, version="1", worker="0") == 1
    families = list(FORMATS[kind][1](text))
    assert {"worker" in one.labels for family in families for one in family.samples} == {True}
    (room,) = [family for family in families if family.name == "room"]
    assert room.documentation == 'Room left, in "boxes".\nA second line.'
    assert text.count("# HELP room") == text.count("# TYPE room gauge") == 1
    assert text.count("# EOF") == (kind == "openmetrics")


def test_what_else_a_sample_has_is_left_as_it_is() -> None:
    text = together(exposed(1))

    assert [
        (one.exemplar.labels, one.exemplar.value)
        for family in parse_openmetrics(text)  # type: ignore[no-untyped-call]
        for one in family.samples
        if one.exemplar is not None
    ] == [({"trace": "a b"}, 1.5)]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_label_of_the_same_name_is_kept_under_another(kind: str) -> None:
    hostile = 'x",worker="7 {\\\n'
    text = together(exposed(1, kind, worker="ann"), exposed(2, kind, shop=hostile, worker=hostile), kind=kind)

    assert sample(text, "orders_total", kind, exported_worker="ann", worker="0") == 1
    assert sample(text, "orders_total", kind, shop=hostile, exported_worker=hostile, worker="1") == 2


def test_a_family_of_another_type_is_left_out() -> None:
    text = together(exposed(1), "# TYPE orders gauge\norders 7.0\n# EOF\n")

    assert sample(text, "orders", worker="1") is None
    assert sample(text, "orders_total", worker="0") == 1


def test_braces_without_a_label_are_none() -> None:
    (line,) = labelled("# TYPE room gauge\nroom{} 1\n", "0")["room"].samples

    assert line == 'room{worker="0"} 1'


def test_without_a_worker_series_stay_as_they_are() -> None:
    text = merged([labelled(exposed(1, worker="ann"), None)], open_metrics=True)

    assert sample(text, "orders_total", worker="ann") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "not a metric\n",
        "<html></html>",
        "<html>\n",
        "orders 1\n",
        "# TYPE orders counter\norders_total 1",
        "# TYPE orders counter\nroom 1\n",
        "# TYPE orders counter\norders_total one\n",
        "# TYPE orders counter\norders_total\n",
        "# Not Found\n",
    ],
    ids=repr,
)
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        labelled(text, "0")


def test_a_scrape_of_many_partitions_is_quick_here_too() -> None:
    """Two workers with 500 partitions and 15 gauges of each."""
    registry = CollectorRegistry()
    for number in range(15):
        gauge = Gauge(f"room_{number}", "Room.", ["group", "topic", "partition"], registry=registry)
        for partition in range(500):
            gauge.labels("billing", "orders", str(partition)).set(partition)
    page = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]

    took = []
    for _ in range(3):
        before = time.thread_time()
        assert together(page, page).count('worker="1"') == 15 * 500
        took.append(time.thread_time() - before)

    assert min(took) <= 0.1
