"""The numbers of the project as commands, measured on a real broker: `python -m benchmarks --help`."""
