"""Verifiers: a rollout goes in, a verdict comes out.

To add one, write an async function and name it `file.py:function` in the recipe.
"""
