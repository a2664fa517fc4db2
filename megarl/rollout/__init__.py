"""Engines, and the service that turns prompts into groups of scored rollouts."""
