"""What a running engine tells of itself: statistics, and why a partition does not advance."""
