"""Shared by all tests: the environment of a run, and the meaning of the marks."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from pathlib import Path

import pytest

from megarl.system.process_env import prepare_environment

prepare_environment(1)  # before a test imports Ray, which reads its settings then
pytest.register_assert_rewrite("support")  # failed asserts of helpers show their values as well


NOT_FAST = set((Path(__file__).parent / "not_fast.txt").read_text().split())
"""Files, and tests as FILE::NAME, that take seconds: `tests/run.sh fast` leaves them out."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped, and say so, where there is none. Files with slow tests come
    first, or one process would be left with them at the end.
    """
    import torch

    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if NOT_FAST & {item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]}:
            item.add_marker(pytest.mark.not_fast)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_configure(config: pytest.Config) -> None:
    """All workers of xdist have the fork servers of the process that starts them."""
    starts_workers = config.getoption("numprocesses", 0) and not hasattr(config, "workerinput")
    if starts_workers and any("system" in Path(name).parts for name in config.args):
        from support import fork_server

        fork_server.start_servers()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An `async def` test runs in an event loop of its own, for two minutes at most, or as long as
    its mark `timeout` says.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    mark = pyfuncitem.get_closest_marker("timeout")
    within_s = mark.args[0] if mark else 120
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), within_s))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that start Ray, vLLM or whole runs fork their processes from the test fork server. A
    test that could take longer than until MEGARL_TESTS_END, in seconds since 1970, is skipped.
    """
    from support import fork_server

    mark = item.get_closest_marker("timeout")
    timeout_s = float(mark.args[0] if mark else item.config.getini("timeout"))
    if time.time() + timeout_s > float(os.environ.get("MEGARL_TESTS_END", "inf")):
        pytest.skip(f"may take {timeout_s:.0f} s, and there is less time left")
    fork_server.use("system" in Path(item.path).parts or bool(item.get_closest_marker("engine")))
