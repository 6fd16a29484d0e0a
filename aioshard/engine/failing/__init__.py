"""What becomes of a record whose attempts fail: tried again, skipped, dead-lettered, parked, halted."""
