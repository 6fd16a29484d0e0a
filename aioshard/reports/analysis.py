"""Skew, tail, lag and progress of an app's journal, as SQL.

A report is a mapping: facts by name, and tables as lists of rows. JSON, the terminal and the page show the same
content. The suffix of a name tells its unit: `_us` is microseconds, `_share` is a share from 0 to 1.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aioshard.errors import SettingsError
from aioshard.reports.tables import Tables

Report = Mapping[str, Any]

_PERCENTILES = {"p50_us": 0.5, "p90_us": 0.9, "p95_us": 0.95, "p99_us": 0.99, "p99.9_us": 0.999, "p100_us": 1}
"""Percentiles of the records; exact, with interpolation between two records."""

_NAMED = """(
    SELECT rows.*, kinds.kind,
        CASE kinds.kind WHEN 'key' THEN key_name WHEN 'partition' THEN partition_name ELSE shard_name END AS name
    FROM {rows} AS rows CROSS JOIN (VALUES ('key'), ('partition'), ('shard')) AS kinds(kind))"""
"""Each row once for its key, its partition and its shard."""
_RAN = "(SELECT * FROM {rows} WHERE service_us IS NOT NULL)"


class Journal(NamedTuple):
    """The rows of one handler in a journal.

    Attributes:
        tables: Computes the reports.
        handler: Name of the handler.
        rows: The table of its rows. `service_us` is the duration of the latest attempt, `wait_us` the time from the
            arrival to its start, and `total_us` the sum.
        start_us: Arrival of the first record, in microseconds since the epoch.
        wall_us: Microseconds from the first arrival to the last completion.
        rebalances: Rebalances of all members, oldest first.
    """

    tables: Tables
    handler: str
    rows: str
    start_us: int
    wall_us: int
    rebalances: list[dict[str, Any]]

    def query(self, sql: str, **names: object) -> list[dict[str, Any]]:
        """Return the rows of a query that names tables and values in braces.

        `rows`, `ran` (the rows whose handler ran), `named` (see `_NAMED`) and `start` need not be given.
        """
        return self.tables.query(sql, **self._names, **names)

    def keep(self, sql: str, **names: object) -> str:
        """Store the result of such a query, and return the name of the table."""
        return self.tables.keep(sql, **self._names, **names)

    @property
    def _names(self) -> dict[str, object]:
        named, ran = (part.format(rows=self.rows) for part in (_NAMED, _RAN))
        return {"rows": self.rows, "named": named, "ran": ran, "start": self.start_us}


def read_journal(tables: Tables, path: str, handler: str | None = None) -> Journal:
    """Read the rows of a handler from a journal.

    Args:
        tables: Tables that can read *path*.
        path: A directory of Parquet files, or one file.
        handler: Name of the handler; by default the one with the most records.

    Raises:
        SettingsError: The journal has no rows, or none of the handler.
    """
    everything = tables.read(path)
    found = tables.query(
        """SELECT handler, min(arrived_us) AS start_us, max(finished_us) AS end_us FROM {rows}
        WHERE handler IS NOT NULL GROUP BY handler ORDER BY count(*) DESC, handler""",
        rows=everything,
    )
    handlers = {row["handler"]: row for row in found}
    if not handlers:
        raise SettingsError(f"the journal {path} has no rows: let an app with journal={path!r} process records first")
    handler = handler or next(iter(handlers))
    if handler not in handlers:
        raise SettingsError(f"the journal {path} has no rows of handler {handler!r}, only of {', '.join(handlers)}")
    start = handlers[handler]["start_us"]
    end = handlers[handler]["end_us"]
    rebalances = tables.query(
        """SELECT started_us - {start} AS at_us, service_us AS for_us, member, attempts AS revoked, error_type AS kind,
            error AS cause FROM {rows} WHERE status = 'rebalance' ORDER BY started_us""",
        rows=everything,
        start=start,
    )
    name = handler.encode().hex().upper()  # the two escape a quote in different ways
    rows = tables.keep("SELECT * FROM {rows} WHERE hex(handler) = '{name}'", rows=everything, name=name)
    return Journal(tables, handler, rows, start, max((end or start) - start, 1), rebalances)


def _by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with `by` for `kind`: SQL reserves the word."""
    return [{"by": row.pop("kind"), **row} for row in rows]


def skew(journal: Journal, top: int = 10) -> Report:
    """Sum records and work by key, partition and shard. Work is the duration of the latest attempts.

    Args:
        journal: The journal to analyze.
        top: Number of keys, partitions and shards to name.
    """
    (totals,) = journal.query(
        """SELECT count(*) AS records, count(service_us) AS ran, coalesce(sum(service_us), 0) AS work_us,
        count_if(attempts > 1) AS retried, count_if(key_hash IS NULL) AS without_key FROM {rows}"""
    )
    groups = journal.keep(
        """SELECT kind, name, count(*) AS records, coalesce(sum(service_us), 0) AS work_us
        FROM {named} AS named WHERE name IS NOT NULL GROUP BY kind, name"""
    )
    # The Gini coefficient is 0 if all groups are equal, and close to 1 if one of them has everything.
    spread = journal.query(
        """SELECT kind, count(*) AS groups, sum(records) AS records, sum(work_us) AS work_us,
            2 * sum(CAST(records AS DOUBLE) * records_rank) / (count(*) * sum(records)) - (count(*) + 1) / count(*)
                AS records_gini,
            2 * try_divide(sum(CAST(work_us AS DOUBLE) * work_rank), count(*) * sum(work_us))
                - (count(*) + 1) / count(*) AS work_gini,
            max(records) / sum(records) AS hottest_records_share,
            try_divide(max(work_us), sum(work_us)) AS hottest_work_share
        FROM (SELECT *, row_number() OVER (PARTITION BY kind ORDER BY records) AS records_rank,
                row_number() OVER (PARTITION BY kind ORDER BY work_us) AS work_rank FROM {groups}) AS ranked
        GROUP BY kind ORDER BY kind""",
        groups=groups,
    )
    hottest = journal.query(
        """SELECT kind, name, records, records_share, work_us, work_share FROM (
            SELECT *, records / sum(records) OVER (PARTITION BY kind) AS records_share,
                try_divide(work_us, sum(work_us) OVER (PARTITION BY kind)) AS work_share,
                row_number() OVER (PARTITION BY kind ORDER BY work_us DESC, records DESC, name) AS rank
            FROM {groups}) AS shares
        WHERE rank <= {top} ORDER BY kind, rank""",
        groups=groups,
        top=top,
    )
    journal.tables.drop(groups)
    return {"handler": journal.handler, **totals, "spread": _by_kind(spread), "hottest": _by_kind(hottest)}


def tail(journal: Journal, top: int = 10) -> Report:
    """Find the slowest records, the waiting they caused, and the partitions and keys that finished last.

    Args:
        journal: The journal to analyze.
        top: Number of partitions and keys to name.
    """
    (facts,) = journal.query(
        """SELECT count(*) AS records, coalesce(sum(wait_us), 0) AS wait_us,
        coalesce(sum(service_us), 0) AS work_us FROM {ran} AS ran"""
    )
    shares = enumerate(_PERCENTILES.values())
    levels = ", ".join(f"percentile(us, {share}) AS level_{number}" for number, share in shares)
    durations = journal.query(
        """SELECT measure, avg(us) AS mean_us, {levels} FROM (
            SELECT measures.measure, CASE measures.measure
                WHEN 'wait' THEN wait_us WHEN 'service' THEN service_us ELSE total_us END AS us
            FROM {ran} AS ran CROSS JOIN (VALUES ('wait'), ('service'), ('total')) AS measures(measure)) AS durations
        GROUP BY measure ORDER BY measure DESC""",
        levels=levels,
    )
    percentiles = [
        {
            "of": row["measure"],
            "mean_us": row["mean_us"],
            **{name: row[f"level_{number}"] for number, name in enumerate(_PERCENTILES)},
        }
        for row in durations
    ]
    slowest = journal.keep(
        """SELECT * FROM {ran} AS ran ORDER BY service_us DESC, topic, partition, record_offset
        LIMIT {most}""",
        most=max(facts["records"] // 100, 1),
    )
    (slow,) = journal.query(
        """SELECT count(*) AS slowest, min(service_us) AS slowest_from_us,
        try_divide(sum(service_us), {work}) AS slowest_work_share FROM {slowest}""",
        slowest=slowest,
        work=facts["work_us"],
    )
    # Runs of one shard never overlap, so no microsecond of a record's wait is counted twice.
    (behind,) = journal.query(
        """SELECT /*+ BROADCAST(slow) */ try_divide(sum(greatest(
            least(slow.finished_us, ran.started_us) - greatest(slow.started_us, ran.arrived_us), 0
        )), {wait}) AS slowest_wait_share
        FROM {ran} AS ran JOIN {slowest} AS slow ON ran.shard = slow.shard AND ran.member = slow.member
            AND ran.arrived_us < slow.finished_us AND ran.started_us > slow.started_us""",
        slowest=slowest,
        wait=facts["wait_us"],
    )
    last = journal.query(
        """SELECT kind, name, finished_us - {start} AS after_us, records, work_us FROM (
            SELECT kind, name, max(finished_us) AS finished_us, count(*) AS records, sum(service_us) AS work_us,
                row_number() OVER (PARTITION BY kind ORDER BY max(finished_us) DESC, name) AS rank
            FROM {named} AS named
            WHERE kind != 'shard' AND name IS NOT NULL AND service_us IS NOT NULL GROUP BY kind, name) AS ends
        WHERE rank <= {top} ORDER BY kind, rank""",
        top=top,
    )
    journal.tables.drop(slowest)
    return {
        "handler": journal.handler,
        "wall_us": journal.wall_us,
        **facts,
        **slow,
        **behind,
        "percentiles": percentiles,
        "last": _by_kind(last),
    }


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
    slots = ", ".join(f"({slot})" for slot in range(moments + 1))
    # A record changes the counts when it is produced, arrives and finishes: the counts at a moment are cumulative sums.
    counts = """WITH changes AS (
            SELECT partition_name AS name,
                CASE steps.step WHEN 1 THEN least(produced_us, arrived_us) WHEN 2 THEN arrived_us ELSE finished_us END
                    AS at_us,
                CASE steps.step WHEN 1 THEN 1 WHEN 2 THEN 0 ELSE -1 END AS unfinished,
                CASE steps.step WHEN 1 THEN 0 WHEN 2 THEN 1 ELSE -1 END AS in_flight
            FROM {ran} AS ran CROSS JOIN (VALUES (1), (2), (3)) AS steps(step)),
        known AS (
            SELECT name, greatest(CAST(ceil((at_us - {start}) / {step}) AS BIGINT), 0) AS slot, unfinished,
                in_flight FROM changes
            UNION ALL
            SELECT names.name, slots.slot, 0, 0
            FROM (SELECT DISTINCT name FROM changes) AS names CROSS JOIN (VALUES {slots}) AS slots(slot))
        SELECT name, slot, sum(sum(unfinished)) OVER so_far AS unfinished, sum(sum(in_flight)) OVER so_far AS in_flight
        FROM known GROUP BY name, slot WINDOW so_far AS (PARTITION BY name ORDER BY slot) ORDER BY name, slot"""
    times = [{"at_us": slot * step, "unfinished": 0, "in_flight": 0, "partitions": {}} for slot in range(moments + 1)]
    most: dict[str, dict[str, Any]] = {}
    for row in journal.query(counts, step=step, slots=slots):
        name = row["name"]
        at = times[row["slot"]]
        now = {key: row[key] for key in ("unfinished", "in_flight")}
        at["partitions"][name] = now
        at["unfinished"] += now["unfinished"]
        at["in_flight"] += now["in_flight"]
        if name not in most or now["unfinished"] > most[name]["unfinished"]:
            most[name] = {"partition": name, **now, "at_us": at["at_us"]}
    (errors,) = journal.query("SELECT count_if(produced_us > arrived_us) AS clock_errors FROM {ran} AS ran")
    return {"handler": journal.handler, **errors, "most": [*most.values()], "moments": times}


def progress(journal: Journal, moments: int = 12) -> Report:
    """Count the records that finished in equal intervals, with the rebalances and the stalls among them.

    A stall is one or more consecutive intervals in which no record of the handler finished. Its cause is the rebalance
    that overlaps it longest. Without a rebalance the cause is unknown: look at the records that ran then.

    Args:
        journal: The journal to analyze.
        moments: Number of intervals; the last one ends with the journal.
    """
    step = -(-journal.wall_us // moments)
    counts = """SELECT name, slot, count(*) AS finished FROM (
            SELECT partition_name AS name,
                least(CAST(floor((finished_us - {start}) / {step}) AS BIGINT), {last}) AS slot
            FROM {ran} AS ran) AS ends
        GROUP BY name, slot ORDER BY name, slot"""
    times: list[dict[str, Any]] = [
        {"at_us": slot * step, "finished": 0, "per_s": 0.0, "partitions": {}} for slot in range(moments)
    ]
    for row in journal.query(counts, step=step, last=moments - 1):
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
