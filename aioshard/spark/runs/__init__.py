"""A run on disk: its plan, its directory and its progress."""
