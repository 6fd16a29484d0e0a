"""Failure handling: records whose attempts fail are retried, skipped, dead-lettered, parked or halted."""
