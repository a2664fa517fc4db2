"""`megarl doctor`: what this machine has, and whether it is enough."""
