"""Commands about a run folder, or about the model in it."""
