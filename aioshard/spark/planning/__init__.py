"""Planning a run from the app and the state of the brokers."""
