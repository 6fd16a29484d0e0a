"""The planned ranges through the handlers."""
