"""A run on disk: its plan, its directory, how far it is."""
