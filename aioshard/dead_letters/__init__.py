"""Dead letters: find them, see why they failed, try their handlers, and send them back."""
