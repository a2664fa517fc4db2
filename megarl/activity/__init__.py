"""What each process of a run is doing, and on whom it waits, recorded in the run folder."""
