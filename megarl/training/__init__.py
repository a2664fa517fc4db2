"""The policy: a Hugging Face model under DeepSpeed, packed rows, one normaliser, atomic checkpoints."""
