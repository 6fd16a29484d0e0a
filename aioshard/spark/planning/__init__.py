"""What a run is going to do, found out with the brokers."""
