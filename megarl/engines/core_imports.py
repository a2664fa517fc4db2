"""Imported by the fork server of `megarl.engines.vllm_core`, from which vLLM's core is forked."""

from megarl.system.quick_imports import quick_imports

with quick_imports():
    import vllm.v1.engine.core  # noqa: F401 - the import itself is the purpose
