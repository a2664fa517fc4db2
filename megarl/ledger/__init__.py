"""The ledger of a run, ledger.jsonl in its run folder: a checksummed list of events that say what
became of every group, the rollouts of one prompt.
"""
