"""The agents of docs/howto/agents.md as they are published, where they are on the PATH,
with a model that says one text after the other.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.agents import codec_of_characters
from support.commands import ROOT
from support.documented import blocks_of

from megarl.apps.gateway.agent_kit import AgentKit
from megarl.environments.session import Observation
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{said}</tool_call>"


WRITE, SHOW, DONE = "echo seven > a.txt", "cat a.txt", "That is all."
ENDS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat a.txt"
AGENTS = {
    "claude": ("Bash", [call("Bash", command=WRITE), f"so {call('Bash', command=SHOW)}", DONE]),
    "codex": ("exec_command",
     [call("exec_command", cmd=WRITE), f"so {call('exec_command', cmd=SHOW)}", DONE]),
    "opencode": ("todowrite",
     [call("bash", command=WRITE), f"so {call('bash', command=SHOW)}", DONE]),
    "mini": ("bash", [call("bash", command=one) for one in (WRITE, SHOW, ENDS)]),
    "aider": ("", ["```\nseven\n```\n", "a.txt\n```\nseven\n```\n"]),
}  # fmt: skip
"""{block of the page, and program: (a tool, by which the main conversation is known, turns)}"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_a_published_agent_finishes(name: str, tmp_path: Path) -> None:
    """In one conversation, in which each call begins with the tokens of all before; what is beside
    it, such as a title, is another one.
    """
    if shutil.which(name) is None:
        pytest.skip(f"there is no program {name} on the PATH (docs/howto/agents.md)")
    (block,) = (
        one for one in blocks_of(ROOT / "docs/howto/agents.md") if one.head == f"yaml {name}"
    )
    settings: Any = yaml.safe_load(block.body)["environment"]["agent"]
    asked, answer, untrained = asyncio.run(play(settings, *AGENTS[name], tmp_path))
    assert "seven" in answer.text or DONE in answer.text
    assert [is_main for is_main, _ in asked].count(True) == len(AGENTS[name][1])
    main = [one for is_main, one in asked if is_main]
    assert main[0].follows == -1 and all(one.follows > 0 for one in main[1:])
    if name != "aider":
        assert "seven" in main[2].text  # the command was run
    assert len(untrained) == len(asked) - len(main), "of the side calls only"
    assert answer.metrics["conversations"] == 1 + (len(asked) - len(main))


async def play(
    settings: Any, tool: str, says: list[str], folder: Path
) -> tuple[list[Any], Any, list[int]]:
    """([(whether a call is of the main conversation, what the model was asked)], the answer, turns not trained)."""
    codec, agent = codec_of_characters(folder), settings | {"context_tokens": 200_000}
    config = EnvironmentConfig(agent=agent)
    kit, asked, left = AgentKit(config, codec, {}), [], list(says)
    await kit.start()
    session = kit.session()
    try:
        made: Any = await session.start(Prompt(0, "Write seven into a.txt.", [], "7"))
        while isinstance(made, Observation):
            is_main = made.follows != -1 or tool in made.text
            asked.append((is_main, made))
            ids = np.array(codec.encode((left.pop(0) if is_main else "A title") + "<|im_end|>"))
            made = await session.step(codec.decode(ids), ids.astype(np.int32))
        return asked, made, session.untrained
    finally:
        await session.close()
        assert kit.serving is not None
        kit.serving.cancel()
