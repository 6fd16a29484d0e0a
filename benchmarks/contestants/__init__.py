"""The contestants: each runs alone in a separate process, `python -m benchmarks.contestants SPEC`."""
