"""Weight synchronisation: the trainer's weights go to the inference engines after each step."""
