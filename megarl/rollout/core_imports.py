"""What the process imports from which vLLM's engine core is forked; see
`megarl.rollout.engine_core`.
"""

from megarl.quick_imports import quick_imports

with quick_imports():
    import vllm.v1.engine.core  # noqa: F401 - the import itself is the purpose
