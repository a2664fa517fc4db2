"""Checks before a run: `preflight` of the recipe, `doctor` of the machine."""
