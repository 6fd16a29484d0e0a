"""Metrics of several processes as those of one."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from aioshard.telemetry.exposition import Collected
from aioshard.web.merged import labelled, merged


def exposed(orders: float, **labels: str) -> str:
    """What a process with one metric of each type exposes."""
    registry = CollectorRegistry()
    counter = Counter("orders", "Orders taken in.", sorted(labels), registry=registry)
    (counter.labels(**labels) if labels else counter).inc(orders)
    Gauge("room", 'Room left, in "boxes".\nA second line.', registry=registry).set(orders / 2)
    Histogram("weight", "Of a box.", buckets=(1, 2), registry=registry).observe(1.5)
    Info("build", "What runs.", registry=registry).info({"version": "1"})
    return openmetrics(registry)


def openmetrics(registry: CollectorRegistry) -> str:
    text: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    return text.decode()


def registry_of(*texts: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Collected(merged(labelled(text, str(number)) for number, text in enumerate(texts))))
    return registry


def test_every_series_gets_the_label_and_each_family_is_told_once() -> None:
    registry = registry_of(exposed(1), exposed(5))

    assert registry.get_sample_value("orders_total", {"worker": "0"}) == 1
    assert registry.get_sample_value("orders_total", {"worker": "1"}) == 5
    assert registry.get_sample_value("weight_bucket", {"le": "2.0", "worker": "1"}) == 1
    assert registry.get_sample_value("build_info", {"version": "1", "worker": "0"}) == 1
    told = generate_latest(registry).decode()
    assert told.count("# TYPE orders_total counter") == 1
    assert told.count("# HELP room") == 1


def test_the_result_is_openmetrics_again() -> None:
    """The strict parser refuses a family that comes twice, and series that come twice."""
    text = openmetrics(registry_of(exposed(1), exposed(5)))
    names = [family.name for family in text_string_to_metric_families(text)]  # type: ignore[no-untyped-call]

    assert sorted(names) == ["build", "orders", "room", "weight"]


def test_a_label_of_the_same_name_is_kept_under_another() -> None:
    registry = registry_of(exposed(1, worker="ann"))

    assert registry.get_sample_value("orders_total", {"exported_worker": "ann", "worker": "0"}) == 1


def test_a_family_of_another_type_is_left_out() -> None:
    registry = registry_of(exposed(1), "# TYPE orders gauge\norders 7.0\n# EOF\n")

    assert registry.get_sample_value("orders", {"worker": "1"}) is None
    assert registry.get_sample_value("orders_total", {"worker": "0"}) == 1


@pytest.mark.parametrize("text", ["", "not a metric\n", "<html></html>", "# TYPE orders counter\norders_total 1\n"])
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        labelled(text, "0")
