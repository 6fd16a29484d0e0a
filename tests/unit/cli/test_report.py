"""`aioshard report`: its output, its page and its refusals."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aioshard.cli import report
from aioshard.cli.main import main
from aioshard.errors import SettingsError
from aioshard.reports import tables
from aioshard.spark.session import DEFAULT_MASTER
from tests.support.chromium import ChromiumUnavailableError, browser, dump_page, take_screenshot
from tests.support.journals import Row, rebalance, seeded_rows, write_journal
from tests.support.requirements import in_ci

RECORDS = 300
DANGEROUS = b"<script>alert(1)</script>"
VOCABULARIES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
"""Names, which nothing fetches."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = seeded_rows(2, RECORDS, rate=100, show_keys=True)
    rows.append(Row(offset=RECORDS, key=DANGEROUS, key_hash=1, shard=1, duration=30.0))
    rows += [rebalance(0.5, 0.25, "somebody came"), rebalance(6.0, 12.0, "<b>somebody</b> went")]
    return write_journal(tmp_path_factory.mktemp("journal"), rows)


@pytest.fixture(scope="module")
def page(journal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", "html", str(journal), "--out", str(page), "--title", "Orders & returns"])
    assert ended.value.code == 0
    return page


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert isinstance(ended.value.code, int)
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = asked(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_json_has_every_figure(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skew = answered(capsys, "skew", str(journal), "--top", "1")
    tail = answered(capsys, "tail", str(journal))
    lag = answered(capsys, "lag", str(journal), "--moments", "3")

    assert skew["records"] == RECORDS + 1
    assert [group["by"] for group in skew["hottest"]] == ["key", "partition", "shard"]
    assert tail["last"][0] == {"by": "key", "name": DANGEROUS.decode(), "records": 1, "work_us": 30_000_000} | {
        "after_us": tail["wall_us"]
    }
    assert [len(moment["partitions"]) for moment in lag["moments"]] == [4, 4, 4, 4]


def test_a_stall_is_reported_with_its_rebalance(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "progress", str(journal), "--moments", "6")

    assert [moment["finished"] for moment in found["moments"]] == [RECORDS, 0, 0, 0, 0, 1]
    assert found["moments"][0]["per_s"] == pytest.approx(RECORDS / 5, rel=0.01)
    assert found["moments"][5]["partitions"] == {"orders/0": 1}
    step = found["moments"][1]["at_us"]
    assert found["stalls"] == [{"at_us": step, "for_us": 4 * step, "cause": "<b>somebody</b> went"}]
    assert [(rebalance["for_us"], rebalance["kind"], rebalance["revoked"]) for rebalance in found["rebalances"]] == [
        (250_000, "revoked", 4),
        (12_000_000, "revoked", 4),
    ]
    assert answered(capsys, "tail", str(journal))["records"] == RECORDS + 1, "a rebalance is not a record"


def test_tables_are_readable(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, "tail", str(journal))

    assert code == 0
    assert re.search(rf"^records +{RECORDS + 1}$", out, re.MULTILINE)
    assert re.search(r"^last:\nby +name +after +records +work$", out, re.MULTILINE)


def test_the_report_page_loads_no_resources(page: Path) -> None:
    text = page.read_text()

    assert set(re.findall(r"https?://[^\"'\s)<]+", text)) <= VOCABULARIES
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", text)
    assert text.count("<svg") == 2
    assert text.count('<rect class="rebalances"') == 2
    assert '<rect class="stalls"' in text


def test_record_contents_are_escaped(page: Path) -> None:
    assert "&lt;script&gt;" in page.read_text()
    assert "<title>&lt;b&gt;somebody&lt;/b&gt; went</title>" in page.read_text()
    assert "Orders &amp; returns" in page.read_text()


@pytest.mark.chaos
def test_a_real_browser_opens_the_page_offline(page: Path, tmp_path: Path) -> None:
    try:
        browser()
    except ChromiumUnavailableError as missing:
        if in_ci():
            pytest.fail(f"no Chromium, which CI must have: {missing}", pytrace=False)
        pytest.skip(f"no Chromium: {missing}")
    seen = dump_page(page)
    pictures = [tmp_path / "day.png", tmp_path / "night.png"]
    for picture, dark in zip(pictures, (False, True), strict=True):
        take_screenshot(page, picture, width=400, height=1_200, dark=dark)

    assert "slowest wait share" in seen
    day, night = (picture.read_bytes() for picture in pictures)
    assert min(len(day), len(night)) > 10_000
    assert day != night


def test_a_path_without_a_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"topic": ["t"]}), other / "rows.parquet")
    text = tmp_path / "text.parquet"
    text.write_text("hello")

    for path, expected in (
        (tmp_path / "missing", "cannot be read"),
        (empty, "is not a journal"),
        (other, "has no column"),
        (text, "cannot be read"),
    ):
        code, out, err = asked(capsys, "skew", str(path))
        assert (code, out) == (2, "")
        assert expected in err


def test_wrong_usage_is_a_clear_error(journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = asked(capsys, "html", str(journal), "--out", str(tmp_path / "no" / "page.html"))

    assert code == 2
    assert "does not exist; create it first" in err


@pytest.mark.parametrize(
    ("missing", "options", "extra"),
    [("pyarrow", (), "report"), ("duckdb", (), "report"), ("pyspark", ("--master", "local[1]"), "spark")],
)
def test_a_missing_extra_is_named(
    journal: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    options: Sequence[str],
    extra: str,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == missing else find(name, *more))

    code, _, err = asked(capsys, "skew", str(journal), *options)

    assert code == 2
    assert f"aioshard[{extra}]" in err


def test_only_a_large_journal_is_read_on_spark(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions: list[str] = []

    def session(master: str) -> NoReturn:
        sessions.append(master)
        raise SettingsError("no Spark in this test")

    monkeypatch.setattr(report, "session", session)
    assert asked(capsys, "skew", str(journal))[0] == 0
    assert sessions == []

    assert asked(capsys, "skew", str(journal), "--master", "local[1]")[0] == 2
    monkeypatch.setattr(tables, "LARGE", 1)
    assert asked(capsys, "skew", str(journal))[0] == 2
    assert sessions == ["local[1]", DEFAULT_MASTER]
