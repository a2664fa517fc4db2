"""Checks before a run starts, and of the machine it starts on."""
