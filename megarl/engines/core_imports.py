"""Imported by the fork server of `megarl.engines.vllm_core`, the process from which vLLM's engine
core is forked on the CPU: it imports what the core needs, while the engine's process imports vLLM.
"""

from megarl.system.quick_imports import quick_imports

with quick_imports():
    import vllm.v1.engine.core  # noqa: F401 - the import itself is the purpose
