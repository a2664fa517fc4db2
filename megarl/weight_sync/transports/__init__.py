"""Ways for weights to travel from trainer ranks to engine ranks, one file each."""
