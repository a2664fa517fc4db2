"""Training: a Hugging Face model under DeepSpeed, packed rows, one normaliser for every layout."""
