"""Convert bytes to objects and back: no await, no clock, no log, no client."""
