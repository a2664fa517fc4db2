"""Environments: they score the rollouts of a run, by a verifier or by a session class of several
turns, and turn scores into rewards.

To add a verifier, write a function (prompt, response) -> number and name it as
`path/to/file.py:function` in `environment.verifier` of the recipe.
"""
