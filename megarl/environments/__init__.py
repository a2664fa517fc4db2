"""Environments: a rollout goes in, a verdict with a reward comes out.

To add a verifier, write an async function and name it `file.py:function` in the recipe.
"""
