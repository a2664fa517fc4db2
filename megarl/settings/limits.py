"""Upper limits of the numbers in recipes, and how often processes look at others."""

MOST_STEPS = 10**7
"""Upper bound of settings that count training steps."""
MOST_TOKENS = 10**8
"""Upper bound of settings that count tokens of a sequence or of an engine step."""
MOST_RANKS = 2**16
"""Upper bound of settings that count ranks, engines or parallel degrees."""
MOST_SAMPLES = 2**16
"""Upper bound of settings that count prompts or samples of a step."""
LONGEST_WAIT_S = 1e6
"""Upper bound of time limits in seconds: eleven days."""
POLL_S = 0.2
"""Seconds between two looks at what another process does."""
