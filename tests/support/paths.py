"""Directories of the project."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
