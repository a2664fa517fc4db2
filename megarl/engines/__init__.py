"""Inference engines: their interface, vLLM, and the Ray actors that run them."""
