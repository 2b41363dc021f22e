"""Programs that feed rubbish to everything that reads what a peer has sent. See `tests.fuzz.driver`."""
