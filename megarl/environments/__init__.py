"""Environments score the rollouts of a run, by a verifier or a session class of several turns.

To add a verifier, write a function (prompt, response) -> number and name it as
`path/to/file.py:function` in `environment.verifier`.
"""
