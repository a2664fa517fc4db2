"""megarl: reinforcement learning of language models on long chains of thought, under any parallel
layout.
"""

__version__ = "0.1.0"
