"""The end of a run: verified, letters sent, handed over."""
