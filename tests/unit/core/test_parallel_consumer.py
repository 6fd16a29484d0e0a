"""What Confluent's Parallel Consumer has noted: read as its own decoder reads it, and never in what others write."""

import base64
import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshard.core.commit_metadata import CommitMetadata
from aioshard.core.finished_offsets import Run, runs_of
from aioshard.core.parallel_consumer import read_parallel_consumer

COMMITS = Path(__file__).parents[2] / "support" / "parallel_consumer" / "commits.txt"
ENCODINGS = {
    *("BitSet", "BitSetCompressed", "BitSetV2", "BitSetV2Compressed"),
    *("RunLength", "RunLengthCompressed", "RunLengthV2", "RunLengthV2Compressed"),
}
ZSTANDARD = b"\x28\xb5\x2f\xfd"


def commits() -> list[tuple[str, int, tuple[Run, ...], str]]:
    """Encoding, committed offset, what its own decoder reads, text."""
    found = []
    for line in COMMITS.read_text().splitlines():
        if not line.startswith("#"):
            encoding, offset, said, text = line.split()
            runs = () if said == "nothing" else tuple(Run(*map(int, run.split("-"))) for run in said.split(","))
            found.append((encoding, int(offset), runs, text))
    return found


def is_like_a_word(runs: tuple[Run, ...], offset: int) -> bool:
    """All its lengths are long."""
    borders = [offset, *(border for run in runs for border in run)]
    return len(borders) > 1 and min(after - before for before, after in itertools.pairwise(borders)) >= 256


@pytest.mark.parametrize(("encoding", "offset", "runs", "text"), commits())
def test_it_is_read_as_its_own_decoder_reads_it(encoding: str, offset: int, runs: tuple[Run, ...], text: str) -> None:
    read = CommitMetadata.read(text, offset)

    if is_like_a_word(runs, offset) and base64.b64decode(text)[:1] in {b"n", b"e"}:
        assert read == CommitMetadata(foreign=text), "records are run twice rather than never"
        return
    assert read == CommitMetadata(finished=runs), encoding
    assert CommitMetadata.read(read.text(offset), offset) == read


def test_there_is_a_text_of_each_encoding() -> None:
    assert {encoding for encoding, *_ in commits()} == ENCODINGS | {"smallest"}


# Against encoders of our own ------------------------------------------------------------


def encoded(finished: set[int], form: str) -> str:
    """Offsets beyond 0 in one of the four forms."""
    count = max(finished, default=-1) + 1
    if form in "lo":
        width = ">h" if form == "l" else ">i"
        bits = sum(1 << one for one in finished).to_bytes(-(-count // 8) + 1, "little")
        content = struct.pack(width, count) + bits
    else:
        lengths, before = [], 0
        for run in runs_of(finished):
            lengths += [run.start - before, run.end - run.start]
            before = run.end
        content = struct.pack(f">{len(lengths) or 1}{'h' if form == 'n' else 'i'}", *(lengths or [0]))
    return base64.b64encode(form.encode() + content).decode()


@given(st.sets(st.integers(1, 200)), st.sampled_from("lone"), st.integers(0, 1 << 62))
def test_each_form_says_the_same(finished: set[int], form: str, offset: int) -> None:
    runs = read_parallel_consumer(encoded(finished, form), offset)

    assert runs == runs_of(offset + one for one in finished)


@given(st.text() | st.binary().map(lambda content: base64.b64encode(content).decode()), st.integers(0, 1 << 63))
def test_whatever_the_text_what_is_read_lies_in_order_beyond_the_offset(text: str, offset: int) -> None:
    before = offset
    for run in CommitMetadata.read(text, offset).finished:
        assert before < run.start < run.end < 1 << 63
        before = run.end


@given(st.binary(max_size=40), st.sampled_from(b"asJp"))
def test_a_frame_that_is_damaged_is_kept_and_told(content: bytes, form: int) -> None:
    text = base64.b64encode(bytes([form]) + ZSTANDARD + b"\xff" + content).decode()

    read = CommitMetadata.read(text, 420)

    assert (read.finished, read.foreign) == ((), text)
    assert "cannot be decompressed" in read.ignored[0]


# What is foreign ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "worker-7",
        "bgABAAMAAgA",  # cut off
        "bgABAAMAAgA=",  # half a number
        "bgABAAMAAgA B",
        "bgABAAMAAg==",  # the last run is of incomplete ones
        "bgAAAAM=",  # the committed offset is complete
        "bgAB//8=",  # fewer than none
        "bAACAwA=",  # the committed offset is complete
        "bAADAgA=",  # the last one is not
        "bAACAgAA",  # too long
        "bAACAg==",  # too short
        "YQACAgA=",  # said to be compressed
        "TAEB",  # an array of bytes
        "AQAAAXBl",  # Kafka Streams
        "billingapp01",
        "billingApp01",
        "billingapp000001",
        "bgkg",
    ],
)
def test_what_its_encoders_would_not_write_is_foreign(text: str) -> None:
    assert CommitMetadata.read(text, 420) == CommitMetadata(foreign=text)


def test_runs_that_end_beyond_the_last_offset_are_foreign() -> None:
    assert read_parallel_consumer("bgABAAMAAgAB", (1 << 63) - 8) is not None
    assert read_parallel_consumer("bgABAAMAAgAB", (1 << 63) - 7) is None


# Compressed -----------------------------------------------------------------------------


def test_what_is_too_large_when_decompressed_is_kept_and_told() -> None:
    cramjam: Any = pytest.importorskip("cramjam")
    bomb = base64.b64encode(b"J" + bytes(cramjam.zstd.compress(struct.pack(">2h", 1, 1) * 3_000_000))).decode()
    assert len(bomb) < 4_096

    read = CommitMetadata.read(bomb, 420)

    assert (read.finished, read.foreign) == ((), bomb)
    assert "more than 262144 bytes" in read.ignored[0]


def test_what_has_too_many_runs_is_kept_and_told() -> None:
    """A text of fifty characters would take a second, and hundreds of megabytes."""
    cramjam: Any = pytest.importorskip("cramjam")
    bits = struct.pack(">i", 2_000_000) + b"\xaa" * 250_000 + b"\0"
    bomb = base64.b64encode(b"s" + bytes(cramjam.zstd.compress(bits))).decode()

    read = CommitMetadata.read(bomb, 420)

    assert (read.finished, read.foreign) == ((), bomb)
    assert "more than 65536 runs" in read.ignored[0]


def test_without_the_library_it_is_kept_and_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    text = next(text for encoding, *_, text in commits() if encoding == "BitSetCompressed")

    read = CommitMetadata.read(text, 420)

    assert read.foreign == text
    assert "compressed with Zstandard" in read.ignored[0]
    assert "pip install 'aiokafka[zstd]'" in read.ignored[0]
