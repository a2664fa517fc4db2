"""The ledger of a run: a checksummed list of events that say what became of every group."""
