"""Training: a Hugging Face model under DeepSpeed on packed sequences. Losses are normalised over
the whole mini-batch, so that results do not depend on the parallel layout.
"""
