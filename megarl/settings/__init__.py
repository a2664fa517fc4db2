"""Every setting of a recipe, how YAML becomes settings, and presets. Nothing here imports torch,
ray, vllm or deepspeed, so that reading a recipe takes milliseconds.
"""
