"""Ray processes of a run: engines, the rollout service, and where they are placed."""
