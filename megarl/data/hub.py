"""Whether the Hugging Face hub answers, asked before a download: Hugging Face's libraries would
retry for most of a minute.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import functools
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal

from megarl.settings.schema import require
from megarl.settings.training import ModelConfig
from megarl.system.files import in_thread
from megarl.system.third_party import opening, refuse_broken_links

ANSWER_WITHIN_S = 5.0
FIX = "fetch the model again, or correct its config.json"


def hub_state() -> Literal["online", "offline", "unreachable"]:
    """`offline` if HF_HUB_OFFLINE is set; otherwise whether the hub (HF_ENDPOINT) answers within 5
    seconds, asked once a process. Proxy settings are respected.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "offline"
    return "online" if _answers(constants.ENDPOINT) else "unreachable"


@functools.cache  # a process asks once: every further wait would add to that of the first
def _answers(endpoint: str) -> bool:
    """Whether the web server `endpoint` answers within `ANSWER_WITHIN_S`."""

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the user's own endpoint
        with contextlib.suppress(urllib.error.HTTPError):  # an error page is an answer
            urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S).close()  # noqa: S310

    # In a thread of its own: the time limit of urlopen does not cover looking up the name.
    asked = in_thread("hub", ask)
    return not concurrent.futures.wait([asked], ANSWER_WITHIN_S).not_done and not asked.exception()


def is_hub_name(name: str) -> bool:
    """Whether the hub may have a repository of this name: `owner/name` or `name`, of ASCII letters,
    digits, dots, dashes and underscores. A name whose first part is a folder here is a path. Does
    not ask the hub.
    """
    first, slash, _ = name.partition("/")
    if slash and os.path.isdir(first):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def refuse_no_folder(name: str, setting: str) -> None:
    """Raise `ValueError` if `name`, the value of the recipe's key `setting`, is neither a file or
    folder here nor a possible hub name.
    """
    path, first = Path(name), name.partition("/")[0]
    if path.exists() or is_hub_name(name):
        return
    beside = os.listdir(path.parent) if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    advice = f"did you mean {path.parent / close[0]}?" if close else "set it to a path or hub name"
    why = f"'{first}' is a folder" if os.path.isdir(first) else "no hub name looks so"
    raise ValueError(
        f"{setting} {name!r} cannot be loaded: there is no such folder here, and {why}; {advice}"
    )


def read_model_folder(name: str, setting: str) -> dict[str, Any]:
    """config.json of the folder `name`, the value of the recipe's key `setting`; empty for a name
    of the hub. Raises `ValueError` if it is neither, or the file cannot be read.
    """
    folder, named = Path(name), f"{setting} {name!r}"
    if not folder.exists():
        refuse_no_folder(name, setting)
        return {}
    file = folder / "config.json"
    why = f"cannot be loaded: there is no file {file}; set it to a model folder or hub name"
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        why = (
            "is in the GGUF format, whose quantised weights are not trained; set it to a folder"
            " with config.json and safetensors, which `python tools/real_model.py` and"
            " transformers' `from_pretrained(..., gguf_file=...)` make"
        )
    require(file.is_file(), f"{named} {why}")
    refuse_broken_links(folder)
    with opening(f"{named} cannot be loaded: {file}", fix=FIX):
        tree = json.loads(file.read_bytes())
        require(tree and isinstance(tree, dict), "it is no JSON object with settings")
        return tree


def refuse_no_weights(config: ModelConfig) -> bool:
    """Whether the section `model` names a folder with weights. Raises `ValueError` if that has
    none, and needs some.
    """
    has_weights = any(Path(config.path).glob("*.safetensors"))
    require(
        config.from_scratch or has_weights or not Path(config.path).is_dir(),
        f"model.path {config.path!r} has no .safetensors weights; set model.from_scratch to"
        " true for random weights, or point model.path at a trained model",
    )
    return has_weights


def why_absent(name: str) -> str:
    """Why a model or data set of the hub was not downloaded, and what to set: continues "`name` is
    not on this machine". Asks the hub, for at most 5 seconds.
    """
    state = hub_state()
    if state == "offline":
        return "and HF_HUB_OFFLINE is set; unset it to download, or set the path of a local copy"
    if state == "unreachable":
        return (
            f"and the Hugging Face hub did not answer within {ANSWER_WITHIN_S:g} s; set the path of"
            " a local copy, HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use what was"
            " downloaded before"
        )
    return (
        f"and the hub did not give it; check the name '{name}', and set HF_TOKEN if it is private"
    )
