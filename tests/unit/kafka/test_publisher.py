"""Cutting messages into waves."""

from aioshard.kafka.publisher import waves
from aioshard.ports import Message


def test_waves_are_bounded_in_number_and_size() -> None:
    half = Message("t", bytes(9 * 1024 * 1024))
    small = Message("t", b"")

    assert [len(wave) for wave in waves([half, half, small, half])] == [1, 1, 2]
    assert [len(wave) for wave in waves([small] * 2001)] == [2000, 1]
    assert list(waves([])) == []
