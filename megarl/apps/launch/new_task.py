"""`megarl init FOLDER [--model PATH]`: a folder with a recipe, a reward and problems to begin with.

FOLDER/recipe.yaml      what is trained, on what, how
FOLDER/my_reward.py     the score of a response
FOLDER/problems.jsonl   64 problems, and held_out.jsonl 16 others
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from megarl.errors import UserError
from megarl.system.console import Arguments, result

FILES = Path(__file__).with_name("first_task")
"""What a new task begins with."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NEXT = """\
cd {folder}
megarl run recipe.yaml --check
megarl run recipe.yaml
On one GPU add --rollout.placement colocated. On more GPUs --ranks N trains on N of them.
"""


def main(arguments: list[str]) -> int:
    """Run `megarl init FOLDER [--model PATH]`: write the files of a new task into FOLDER
    (recipe.yaml, my_reward.py, problems.jsonl, held_out.jsonl), and print the commands to run next.
    `arguments`: the words after `megarl init`. Returns the exit code 0. Raises `UserError` for
    other words, and for a folder that has files or cannot be written.
    """
    parser = Arguments("megarl init", usage="megarl init FOLDER [--model PATH]")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args(arguments)
    folder, local = options.folder, Path(os.path.expanduser(options.model))
    model = str(local.resolve()) if options.model and local.exists() else options.model
    if not model:
        parser.error("--model is empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if files := sorted(entry.name for entry in folder.iterdir()):
            raise UserError(f"{folder} has files already, such as {files[0]}; name a new folder")
        for name, text in task_files(model).items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; name another one") from None
    result(NEXT.format(folder=shlex.quote(str(folder))).rstrip())
    return 0


def has_chat_template(model: str) -> bool:
    """Whether a model has a chat template; a name of the hub is taken for one that has."""
    settings = Path(model) / "tokenizer_config.json"
    if not Path(model).is_dir() or (Path(model) / "chat_template.jinja").exists():
        return True
    return settings.exists() and "chat_template" in json.loads(settings.read_text())


def task_files(model: str) -> dict[str, str]:
    """The files of a new task as {file name: text}: a recipe (YAML), a reward function (Python),
    and sums of two numbers as problems and held-out problems (JSON lines with `prompt` and
    `answer`). `model`: path or hub name, the recipe's `model.path`.
    """
    texts = {path.name: path.read_text("utf-8") for path in sorted(FILES.iterdir())}
    recipe = texts["recipe.yaml"].replace("MODEL", json.dumps(model, ensure_ascii=False))
    if not has_chat_template(model):
        recipe = recipe.replace(": chat", ": none")
    reward = texts.pop("my_reward.txt")
    return texts | {"recipe.yaml": recipe, "my_reward.py": reward}
