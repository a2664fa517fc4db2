"""What several tests share: ranks, commands, tiny models, simulated exchanges and engines."""
