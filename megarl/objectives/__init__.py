"""Objectives: pure functions from rewards to advantages and from log-probs to losses.

To add one, write the function and add a line to the dictionary of its module, such as `LOSSES`.
"""
