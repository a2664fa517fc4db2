"""`megarl run`: a run's trainer ranks and its Ray, on this node or on Slurm's nodes."""
