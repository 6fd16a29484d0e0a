"""What is measured: each contestant runs alone in a process of its own, `python -m benchmarks.contestants SPEC`."""
