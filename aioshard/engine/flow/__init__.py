"""How fast and how many at a time: rate limits, workers that come and go."""
