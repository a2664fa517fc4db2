"""Objectives: pure functions from rewards to advantages and from log-probs to losses."""
