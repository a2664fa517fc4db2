"""Inference engines: what an engine must offer, vLLM, and the Ray actors that run them."""
