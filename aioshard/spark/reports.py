"""Skew, tail and lag of an app's journal, as SQL on Spark, and as one HTML page.

A report is a mapping: facts by name, and tables as lists of rows. JSON, the terminal and the page show the same
content. The suffix of a name tells its unit: `_us` is microseconds, `_share` is a share from 0 to 1.
"""

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyarrow import ArrowInvalid, dataset
from pyspark.sql import functions

from aioshard.errors import SettingsError
from aioshard.spark.run_directory import SCHEME
from aioshard.telemetry.journal import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Report = Mapping[str, Any]

_PERCENTILES = ("p50_us", "p90_us", "p95_us", "p99_us", "p99.9_us", "p100_us")
"""Percentiles of the records; exact, with interpolation between two records."""

_READ = frozenset(SCHEMA.names) - {"error_type", "error", "result", "status"}
_HASH = "concat('#', lower(lpad(hex({}), 16, '0')))"
_COLUMNS = (
    "*",
    # The part of a file's name with group, host and process.
    "regexp_extract(_metadata.file_name, r'Z-(.+)-[0-9a-f]{8}\\.parquet$', 1) AS member",
    "concat_ws('/', topic, partition) AS partition_name",
    f"coalesce(try_validate_utf8(key), concat('0x', hex(key)), {_HASH.format('key_hash')}) AS key_name",
    # Fixed shards are numbered from 0; other shards are hashes of 64 bits.
    f"if(shard BETWEEN 0 AND 65535, string(shard), {_HASH.format('shard')}) AS shard_name",
    # Sums of whole microseconds are exact in any order.
    "bigint(round(timestamp * 1000000)) AS produced_us",
    "bigint(round(arrived * 1000000)) AS arrived_us",
    "bigint(round(started * 1000000)) AS started_us",
    "bigint(round(duration * 1000000)) AS service_us",
)
_DERIVED = (
    "*",
    "started_us + service_us AS finished_us",
    "greatest(started_us - arrived_us, 0) AS wait_us",
    "greatest(started_us - arrived_us, 0) + service_us AS total_us",
)
_KINDS = "stack(3, 'key', key_name, 'partition', partition_name, 'shard', shard_name) AS (kind, name)"


class Journal(NamedTuple):
    """The rows of one handler in a journal, cached by Spark.

    Attributes:
        spark: The session.
        handler: Name of the handler.
        rows: Its rows. `service_us` is the duration of the latest attempt, `wait_us` the time from the arrival to its
            start, and `total_us` the sum.
        start_us: Arrival of the first record, in microseconds since the epoch.
        wall_us: Microseconds from the first arrival to the last completion.
        rebalances: Rebalances of all members, oldest first.
    """

    spark: "SparkSession"
    handler: str
    rows: "DataFrame"
    start_us: int
    wall_us: int
    rebalances: list[dict[str, Any]]

    def query(self, sql: str, **frames: Any) -> list[dict[str, Any]]:
        """Return the rows of a query, which names the journal `{rows}`."""
        return [row.asDict() for row in self.spark.sql(sql, rows=self.rows, **frames).collect()]


def check_journal(path: str) -> None:
    """Check, without Spark, that a journal exists.

    Raises:
        SettingsError: The path cannot be read or is not a journal.
    """
    try:
        columns = dataset.dataset(path, format="parquet").schema.names
    except (OSError, ArrowInvalid) as error:
        raise SettingsError(
            f"the journal {path} cannot be read ({error}): expected the directory that an app writes with "
            "App(journal=PATH)"
        ) from error
    if missing := _READ - {*columns}:
        raise SettingsError(
            f"{path} is not a journal of aioshard: it has no column {min(missing)!r}. App(journal=PATH) writes a "
            "journal, and completes a file every minute and when the app stops"
        )


def read_journal(spark: "SparkSession", path: str, handler: str | None = None) -> Journal:
    """Read the rows of a handler from a journal.

    Args:
        spark: A session that can read *path*.
        path: A directory of Parquet files, or one file; a local path, or a URI that Spark supports.
        handler: Name of the handler; by default the one with the most records.

    Raises:
        SettingsError: The journal has no rows, or none of the handler.
    """
    uri = path if SCHEME.match(path) else Path(path).absolute().as_uri()
    rows = spark.read.parquet(uri).selectExpr(*_COLUMNS).selectExpr(*_DERIVED)
    found = spark.sql(
        """SELECT handler, min(arrived_us), max(finished_us) FROM {rows} WHERE handler IS NOT NULL
        GROUP BY handler ORDER BY count(*) DESC""",
        rows=rows,
    )
    handlers = {row[0]: row for row in found.collect()}
    if not handlers:
        raise SettingsError(f"the journal {path} has no rows: let an app with journal={path!r} process records first")
    handler = handler or next(iter(handlers))
    if handler not in handlers:
        raise SettingsError(f"the journal {path} has no rows of handler {handler!r}, only of {', '.join(handlers)}")
    _, start, end = handlers[handler]
    rebalances = spark.sql(
        """SELECT started_us - {start} AS at_us, service_us AS for_us, member, attempts AS revoked, error_type AS kind,
            error AS cause FROM {rows} WHERE status = 'rebalance' ORDER BY started_us""",
        rows=rows,
        start=start,
    )
    rebalance_rows = [row.asDict() for row in rebalances.collect()]
    rows = rows.where(functions.col("handler") == handler).cache()
    return Journal(spark, handler, rows, start, max((end or start) - start, 1), rebalance_rows)


def skew(journal: Journal, top: int = 10) -> Report:
    """Sum records and work by key, partition and shard. Work is the duration of the latest attempts.

    Args:
        journal: The journal to analyze.
        top: Number of keys, partitions and shards to name.
    """
    totals = """SELECT count(*) AS records, count(service_us) AS ran, coalesce(sum(service_us), 0) AS work_us,
        count_if(attempts > 1) AS retried, count_if(key_hash IS NULL) AS without_key FROM {rows}"""
    groups = journal.spark.sql(
        """SELECT kind AS by, name, count(*) AS records, coalesce(sum(service_us), 0) AS work_us
        FROM {named} WHERE name IS NOT NULL GROUP BY kind, name""",
        named=journal.rows.selectExpr("*", _KINDS),
    ).cache()
    # The Gini coefficient is 0 if all groups are equal, and close to 1 if one of them has everything.
    spread = """SELECT by, count(*) AS groups, sum(records) AS records, sum(work_us) AS work_us,
            2 * sum(double(records) * records_rank) / (count(*) * sum(records)) - (count(*) + 1) / count(*)
                AS records_gini,
            2 * try_divide(sum(double(work_us) * work_rank), count(*) * sum(work_us)) - (count(*) + 1) / count(*)
                AS work_gini,
            max(records) / sum(records) AS hottest_records_share,
            try_divide(max(work_us), sum(work_us)) AS hottest_work_share
        FROM (SELECT *, row_number() OVER (PARTITION BY by ORDER BY records) AS records_rank,
                row_number() OVER (PARTITION BY by ORDER BY work_us) AS work_rank FROM {groups})
        GROUP BY by ORDER BY by"""
    hottest = """SELECT by, name, records, records_share, work_us, work_share FROM (
            SELECT *, records / sum(records) OVER (PARTITION BY by) AS records_share,
                try_divide(work_us, sum(work_us) OVER (PARTITION BY by)) AS work_share,
                row_number() OVER (PARTITION BY by ORDER BY work_us DESC, records DESC, name) AS place
            FROM {groups})
        WHERE place <= {top} ORDER BY by, place"""
    report = {
        "handler": journal.handler,
        **journal.query(totals)[0],
        "spread": journal.query(spread, groups=groups),
        "hottest": journal.query(hottest, groups=groups, top=top),
    }
    groups.unpersist()
    return report


def tail(journal: Journal, top: int = 10) -> Report:
    """Find the slowest records, the waiting they caused, and the partitions and keys that finished last.

    Args:
        journal: The journal to analyze.
        top: Number of partitions and keys to name.
    """
    ran = journal.rows.where("service_us IS NOT NULL")
    (facts,) = journal.query(
        """SELECT count(*) AS records, coalesce(sum(wait_us), 0) AS wait_us,
        coalesce(sum(service_us), 0) AS work_us FROM {ran}""",
        ran=ran,
    )
    durations = ran.selectExpr("stack(3, 'wait', wait_us, 'service', service_us, 'total', total_us) AS (of, us)")
    levels = """SELECT of, avg(us) AS mean_us, percentile(us, array(0.5, 0.9, 0.95, 0.99, 0.999, 1)) AS levels
        FROM {durations} GROUP BY of ORDER BY of DESC"""
    percentiles = [
        {"of": row["of"], "mean_us": row["mean_us"], **dict(zip(_PERCENTILES, row["levels"], strict=True))}
        for row in journal.query(levels, durations=durations)
    ]
    slowest = (
        ran.orderBy("service_us", "topic", "partition", "offset", ascending=[False, True, True, True])
        .limit(max(facts["records"] // 100, 1))
        .cache()
    )
    slow = """SELECT count(*) AS slowest, min(service_us) AS slowest_from_us,
        try_divide(sum(service_us), {work}) AS slowest_work_share FROM {slowest}"""
    # Runs of one shard never overlap, so no microsecond of a record's wait is counted twice.
    behind = """SELECT /*+ BROADCAST(slow) */ try_divide(sum(greatest(
            least(slow.finished_us, ran.started_us) - greatest(slow.started_us, ran.arrived_us), 0
        )), {wait}) AS slowest_wait_share
        FROM {ran} AS ran JOIN {slowest} AS slow ON ran.shard = slow.shard AND ran.member = slow.member
            AND ran.arrived_us < slow.finished_us AND ran.started_us > slow.started_us"""
    last = """SELECT by, name, finished_us - {start} AS after_us, records, work_us FROM (
            SELECT kind AS by, name, max(finished_us) AS finished_us, count(*) AS records, sum(service_us) AS work_us,
                row_number() OVER (PARTITION BY kind ORDER BY max(finished_us) DESC, name) AS place
            FROM {named} WHERE kind != 'shard' AND name IS NOT NULL GROUP BY kind, name)
        WHERE place <= {top} ORDER BY by, place"""
    report = {
        "handler": journal.handler,
        "wall_us": journal.wall_us,
        **facts,
        **journal.query(slow, slowest=slowest, work=facts["work_us"])[0],
        **journal.query(behind, ran=ran, slowest=slowest, wait=facts["wait_us"])[0],
        "percentiles": percentiles,
        "last": journal.query(last, named=ran.selectExpr("*", _KINDS), start=journal.start_us, top=top),
    }
    slowest.unpersist()
    return report


def lag(journal: Journal, moments: int = 12) -> Report:
    """Count the unfinished records at equal intervals, as a whole and by partition.

    A journal contains only finished records. Records that were produced but never finished are missing towards its
    end; records that finished before it began are missing at its start. Timestamps are trusted even if the producer
    set them, from its own clock or from the time of an event.

    Args:
        journal: The journal to analyze.
        moments: Number of intervals; the last one ends with the journal.
    """
    step = -(-journal.wall_us // moments)
    # A record changes the counts when it is produced, arrives and finishes; running sums give the counts at a moment.
    changes = journal.rows.where("service_us IS NOT NULL").selectExpr(
        "partition_name AS name",
        """stack(3, least(produced_us, arrived_us), 1, 0, arrived_us, 0, 1, finished_us, -1, -1)
            AS (at_us, unfinished, in_flight)""",
    )
    counts = """SELECT name, slot, sum(sum(unfinished)) OVER so_far AS unfinished,
            sum(sum(in_flight)) OVER so_far AS in_flight
        FROM (
            SELECT name, greatest(ceil((at_us - {start}) / {step}), 0) AS slot, unfinished, in_flight FROM {changes}
            UNION ALL
            SELECT DISTINCT name, slot, 0, 0 FROM {changes} LATERAL VIEW explode(sequence(0, {moments})) AS slot)
        GROUP BY name, slot WINDOW so_far AS (PARTITION BY name ORDER BY slot) ORDER BY name, slot"""
    times = [{"at_us": slot * step, "unfinished": 0, "in_flight": 0, "partitions": {}} for slot in range(moments + 1)]
    most: dict[str, dict[str, Any]] = {}
    for row in journal.query(counts, changes=changes, start=journal.start_us, step=step, moments=moments):
        name, at, now = row["name"], times[row["slot"]], {key: row[key] for key in ("unfinished", "in_flight")}
        at["partitions"][name] = now
        at["unfinished"] += now["unfinished"]
        at["in_flight"] += now["in_flight"]
        if name not in most or now["unfinished"] > most[name]["unfinished"]:
            most[name] = {"partition": name, **now, "at_us": at["at_us"]}
    errors = "SELECT count_if(produced_us > arrived_us) AS clock_errors FROM {rows} WHERE service_us IS NOT NULL"
    return {"handler": journal.handler, **journal.query(errors)[0], "most": [*most.values()], "moments": times}


def progress(journal: Journal, moments: int = 12) -> Report:
    """Count the records that finished in equal intervals, with the rebalances and the stalls among them.

    A stall is one or more consecutive intervals in which no record of the handler finished. Its cause is the rebalance
    that overlaps it longest. Without a rebalance the cause is unknown: look at the records that ran then.

    Args:
        journal: The journal to analyze.
        moments: Number of intervals; the last one ends with the journal.
    """
    step = -(-journal.wall_us // moments)
    counts = """SELECT partition_name AS name, least(div(finished_us - {start}, {step}), {last}) AS slot,
            count(*) AS finished
        FROM {rows} WHERE service_us IS NOT NULL GROUP BY ALL ORDER BY name, slot"""
    times: list[dict[str, Any]] = [
        {"at_us": slot * step, "finished": 0, "per_s": 0.0, "partitions": {}} for slot in range(moments)
    ]
    for row in journal.query(counts, start=journal.start_us, step=step, last=moments - 1):
        at = times[row["slot"]]
        at["partitions"][row["name"]] = row["finished"]
        at["finished"] += row["finished"]
        at["per_s"] = at["finished"] * 1e6 / step
    stalls = []
    for finishes, slots in itertools.groupby(times, key=lambda at: at["finished"] > 0):
        if not finishes:
            begin = next(slots)["at_us"]
            stall = {"at_us": begin, "for_us": step * (1 + sum(1 for _ in slots))}
            stalls.append(stall | {"cause": _cause_of(stall, journal.rebalances)})
    return {"handler": journal.handler, "rebalances": journal.rebalances, "stalls": stalls, "moments": times}


def _cause_of(stall: Mapping[str, int], rebalances: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the cause of the rebalance that overlaps most of a stall."""

    def shared(rebalance: Mapping[str, Any]) -> int:
        ends = [period["at_us"] + period["for_us"] for period in (stall, rebalance)]
        return int(min(ends) - max(stall["at_us"], rebalance["at_us"]))

    longest = max(rebalances, key=shared, default=None)
    return longest["cause"] if longest is not None and shared(longest) > 0 else None


# For people ---------------------------------------------------------------------------


def as_tables(report: Report) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """Yield the title, the headings and the cells of each table of a report; its facts come first."""
    facts = {name: value for name, value in report.items() if not isinstance(value, list)}
    yield "", ("", ""), [(_heading(name), _cell(name, value)) for name, value in facts.items()]
    for title, rows in report.items():
        if isinstance(rows, list) and rows:
            names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
            yield title, list(map(_heading, names)), [[_cell(name, row[name]) for name in names] for row in rows]


def _heading(name: str) -> str:
    return name.removesuffix("_us").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_us"):
        return f"{value / 1e3:.2f} ms" if value < 1e6 else f"{value / 1e6:.2f} s"  # noqa: PLR2004 - a second
    if name.endswith("_share"):
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def report_page(journal: Journal, *, title: str | None = None) -> str:
    """Return all reports as one page that fetches nothing; it has a dark mode and a layout for phones."""
    title = _escaped(title or f"Journal of {journal.handler}")
    began = datetime.fromtimestamp(journal.start_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [f"<h1>{title}</h1><p>Since {began}.</p>"]
    reports = {
        "Progress": progress(journal, _INTERVALS),
        "Tail": tail(journal),
        "Skew": skew(journal),
        "Lag": lag(journal, _INTERVALS),
    }
    for report, content in reports.items():
        parts.append(f"<h2>{report}</h2>")
        if report == "Progress":
            parts.append(_progress_figure(content, journal.wall_us))
        if report == "Lag":
            parts.append(_lag_figure(content["moments"]))
        for name, headings, rows in as_tables(content):
            head = "".join(f"<th>{_escaped(heading)}</th>" for heading in headings)
            body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
            parts.append(
                f'<h3>{name.capitalize()}</h3><div class="wide"><table><thead><tr>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table></div>"
            )
    return _PAGE.format(title=title, body="\n".join(parts))


def _progress_figure(report: Report, wall_us: int) -> str:
    """Plot the finished records of all partitions together, and of those that finished last, over the rebalances."""
    moments = report["moments"]
    last = {name: slot for slot, moment in enumerate(moments) for name in moment["partitions"]}
    series = {"all partitions": [moment["finished"] for moment in moments]}
    for name in sorted(last, key=lambda name: (-last[name], name))[:_TAIL]:
        series[name] = [moment["partitions"].get(name, 0) for moment in moments]
    bands = []
    for kind in ("stalls", "rebalances"):
        for band in report[kind]:
            left, width = (_WIDTH * band[name] / wall_us for name in ("at_us", "for_us"))
            cause = _escaped(band["cause"] or "without a rebalance")
            area = f'x="{left:.1f}" width="{width:.1f}" height="{_HEIGHT}"'
            bands.append(f'<rect class="{kind}" {area}><title>{cause}</title></rect>')
    most = max(series["all partitions"]) * len(moments) * 1e6 / wall_us
    caption = f"Finished records over time, at most {most:,.0f}/s, of all partitions and of those that finished last"
    legend = '<span class="rebalances">rebalances</span><span class="stalls">stalls</span>'
    return _figure(caption, series, "".join(bands), legend)


def _lag_figure(moments: Sequence[Mapping[str, Any]]) -> str:
    """Plot the lag over time."""
    series = {
        "unfinished": [moment["unfinished"] for moment in moments],
        "of them in flight": [moment["in_flight"] for moment in moments],
    }
    return _figure(f"Records over time: at most {max(series['unfinished']):,}", series)


def _figure(caption: str, series: Mapping[str, Sequence[int]], behind: str = "", legend: str = "") -> str:
    """Plot series over time, the largest first, as an SVG element; *behind* are other elements of it."""
    most = max(*next(iter(series.values())), 1)
    lines = []
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(
            f"{_WIDTH * slot / max(len(values) - 1, 1):.1f},{_HEIGHT * (1 - value / most):.1f}"
            for slot, value in enumerate(values)
        )
        lines.append(f'<polyline class="line{number}" points="{points}"/>')
        legend += f'<span class="line{number}">{_escaped(name)}</span>'
    return (
        f'<figure><figcaption>{caption}</figcaption><svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"{behind}{''.join(lines)}</svg>{legend}</figure>"
    )


def _escaped(text: str) -> str:
    """Escape text for HTML and make it printable; keys can contain anything."""
    return html.escape("".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text))


_WIDTH, _HEIGHT, _INTERVALS, _TAIL = 700, 200, 60, 3
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --text: #1c2430; --faint: #97a1ae; --page: #ffffff; --one: #2f6fde; --two: #e07b1f; --three: #1f9d6b;
  --four: #9a5bd0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e4e8ee; --faint: #707b8a; --page: #14181e; --one: #6da2ff; --two: #f5a24f; --three: #4cc894;
    --four: #c08df0; }}
}}
body {{ margin: 0 auto; max-width: 56rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: 0.25rem 1rem 0.25rem 0; white-space: nowrap; }}
tbody tr {{ border-top: 1px solid var(--faint); }}
figure {{ margin: 0.75rem 0; }}
svg {{ display: block; width: 100%; height: auto; border-bottom: 1px solid var(--faint); }}
polyline {{ fill: none; stroke: currentColor; stroke-width: 2; }}
figure span {{ margin-right: 1rem; }}
.line0 {{ color: var(--one); }}
.line1 {{ color: var(--two); }}
.line2 {{ color: var(--three); }}
.line3 {{ color: var(--four); }}
rect.rebalances {{ fill: var(--two); opacity: 0.35; }}
rect.stalls {{ fill: var(--faint); opacity: 0.3; }}
span.rebalances, span.stalls {{ border-bottom: 0.35em solid var(--faint); }}
span.rebalances {{ border-color: var(--two); }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
