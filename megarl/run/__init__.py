"""What a run does: the loops of training and evaluation, and how their parts are built."""
