"""Directories of the project."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]

RUN_DIRECTORY = "AIOSHARD_TEST_RUN"
"""Environment variable by which the leading process tells its workers where the run keeps its state."""
