"""Deadlines of ranks that wait for another role's step, as a run of two gloo ranks makes them: the
policy is on rank 0, and rank 1 has no part of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.commands import tiny_run
from support.ranks import run_ranks
from support.tiny import write_model

COLLECTIVE_S = 777.0


def waits(tree: dict[str, Any]) -> list[float]:
    """Seconds that this rank waits: in a collective of the policy's mesh, in one of all ranks, for
    a sign of life of rank 0, and for an order.
    """
    from megarl.data.tokenizer import load_tokenizer
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import all_ranks
    from megarl.run import build
    from megarl.run.build import step_deadline_s
    from megarl.settings.config import RunConfig, from_tree
    from megarl.trainer.context import RunInputs, open_context
    from megarl.trainer.model_config import load_model_config

    config = from_tree(RunConfig, tree, where="test")
    inputs = RunInputs(
        Layout(),
        load_tokenizer(config.model.path),
        load_model_config(config.model),
        stop_token_ids=[1],
        data="100 rows",
        ranks=(0,),
    )
    with open_context(config, inputs) as context:
        assert isinstance(context.config, RunConfig)
        if context.mesh.is_member:
            # What `build` does on this rank, but for the engines.
            build.broadcast_object(0, all_ranks())
            deadline_s = step_deadline_s(context.config, 0)
            made = build.build_training(context, context.config, inputs, deadline_s)
        else:
            made = build.build(context, context.config, inputs)
        assert made.serving is not None
        return [
            context.mesh.timeout_s,
            made.checkpoints.world.timeout_s,
            made.serving.silence_s,
            made.serving.longest_s,
        ]


def test_a_step_of_another_role_may_take_ten_collectives(tmp_path: Path) -> None:
    from megarl.run.build import step_deadline_s
    from megarl.settings.config import RunConfig, from_tree

    tree = tiny_run(tmp_path, write_model(tmp_path / "model"), 2)
    tree["training"]["collective_timeout_s"] = COLLECTIVE_S
    (tmp_path / "run").mkdir()
    longest_s = step_deadline_s(from_tree(RunConfig, tree, where="test"), 0)
    wanted = [COLLECTIVE_S, 10 * COLLECTIVE_S, COLLECTIVE_S, longest_s]
    assert run_ranks(2, __file__, "waits", tree) == [wanted, wanted]
