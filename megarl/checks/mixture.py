"""Whether the rows of a mixture name verifiers that the recipe has."""

from __future__ import annotations

from megarl.config import RunConfig
from megarl.data.source import PromptList
from megarl.schema import require


def check_environments(config: RunConfig, *lists: PromptList | None) -> None:
    """Raise `ValueError` where rows of the data name a verifier that is not in
    `environment.mixture`, or no row names one that is there.
    """
    known = config.environment.mixture
    read = [prompts for prompts in lists if prompts is not None]
    if not known or not read:
        return
    named: set[str] = set()
    for prompts in read:
        for index, name in enumerate(prompts.environments or ()):
            require(
                name in known,
                f"row {index} of the data (from 0, over all sources) names the verifier"
                f" '{name:.80}', but environment.mixture has {', '.join(known)}; add this name, or"
                " mend the row",
            )
            named.add(name)
    never = [name for name in known if name not in named]
    require(
        not never,
        f"environment.mixture has {', '.join(never)}, which no row of the data names; remove it",
    )
