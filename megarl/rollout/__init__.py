"""The rollout service, which turns prompts into groups of scored rollouts, and its process."""
