"""Pure decisions: no await, no clock, no logging, no I/O; tested with plain values."""
