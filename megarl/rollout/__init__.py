"""Inference engines, and the rollout service that turns prompts into groups of scored rollouts."""
