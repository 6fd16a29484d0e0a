"""What watches an app from outside: metrics and log formats, read from its statistics."""
