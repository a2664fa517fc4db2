"""The ledger of a run: a checksummed record of what became of every group of rollouts."""
