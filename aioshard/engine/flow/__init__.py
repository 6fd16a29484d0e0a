"""Flow control: rate limits, and numbers of workers that change at run time."""
