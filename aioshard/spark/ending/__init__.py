"""The end of a run: verify it, send its dead letters, hand it over."""
