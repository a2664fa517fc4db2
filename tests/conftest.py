"""Shared by all tests: the environment of a run, and the meaning of the marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cluster.process_env import prepare_environment

prepare_environment(1)  # before a test imports Ray, which reads its settings then
pytest.register_assert_rewrite("support")  # failed asserts of helpers show their values as well


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped, and say so, where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that start Ray, vLLM or whole runs fork their processes from the test fork server."""
    from support import fork_server

    fork_server.use("system" in Path(item.path).parts or bool(item.get_closest_marker("engine")))
