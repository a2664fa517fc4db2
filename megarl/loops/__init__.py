"""Training and evaluation loops, one file each: what a `megarl` command does."""
