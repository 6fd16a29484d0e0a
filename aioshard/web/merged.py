"""Metrics of several processes as those of one: every series gets the label `worker`."""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

__all__ = ["LABEL", "OPENMETRICS", "labelled", "merged"]

LABEL = "worker"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""What a worker is asked for: this form says which sample belongs to which family, so nothing is guessed."""


def labelled(text: str, worker: str) -> list[Metric]:
    r"""The metrics in an exposition, with the label `worker` on every series.

    A label of that name which a series has already becomes `exported_worker`, as Prometheus does it.

    Args:
        text: In the OpenMetrics format.
        worker: The label's value.

    Raises:
        ValueError: That is no such text.

    Example:
        >>> (family,) = labelled('# TYPE orders counter\norders_total{shop="a"} 3.0\n# EOF\n', "1")
        >>> family.samples[0].labels
        {'shop': 'a', 'worker': '1'}
    """
    families: list[Metric] = list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    for family in families:
        family.samples = [_labelled(sample, worker) for sample in family.samples]
    return families


def _labelled(sample: Sample, worker: str) -> Sample:
    labels = {("exported_" + name if name == LABEL else name): value for name, value in sample.labels.items()}
    return sample._replace(labels={**labels, LABEL: worker})


def merged(exposed: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Families of the same name become one: help and type are told once, in the words of the first.

    Where a worker has another type under the same name, as while a new version is rolled out by hand, its samples are
    left out: one family has one type, and a mixture would spoil the whole scrape.
    """
    families: dict[str, Metric] = {}
    for metrics in exposed:
        for metric in metrics:
            known = families.get(metric.name)
            if known is None:
                families[metric.name] = metric
            elif known.type == metric.type:
                known.samples.extend(metric.samples)
    return list(families.values())
