"""What can be known of a recipe from the files that it names, within a second or two, before torch
is imported. The whole checks read them all later.
"""

from __future__ import annotations

import contextlib
import glob
import io
import re
import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.data.forms import as_read
from megarl.data.hub import read_model_folder, refuse_no_folder, refuse_no_weights
from megarl.data.rows import Cells, format_of, read_rows
from megarl.data.tokenizer import refuse_no_tokenizer
from megarl.engines.plan import check_engine_tensor
from megarl.environments.user_code import CLASSES, split_name
from megarl.settings.config import AnyConfig, RunConfig
from megarl.settings.data import (
    DataSetConfig,
    DemonstrationsConfig,
    PreferencesConfig,
    PromptsConfig,
)
from megarl.settings.schema import Config, is_own, require
from megarl.settings.training import ModelConfig
from megarl.system.lookup import SOURCES
from megarl.trainer.role_placement import refuse_sizes

DYNAMIC = ("import *", "exec", "__getattr__", "setattr", "vars", "locals", "globals", "modules")
"""Texts in a Python file that may define names which it does not spell out."""
CODE = {"verifier", "rewards", "session", "functions", "function", "advantage", "loss", "method"}
CODE |= {"filter", "kind", "block"}
"""Last parts of the keys of settings that may name a function or class of the user's own."""
LARGE_BYTES = 2**25
"""Size of a data file from which on its columns are left to the whole checks."""


def check_named_files(
    config: AnyConfig, *, trains: bool = True, skip: Collection[str] = ()
) -> None:
    """Raise `ValueError`, with the setting to change, if a model folder, data file, column of its
    first row or own function that the recipe names is missing. `trains`: whether the models of all
    roles are needed. `skip`: dotted settings to leave out. Nothing is looked up in the hub.
    """
    for key, value in _settings(config):
        if key in skip:
            continue
        if isinstance(value, ModelConfig) and value.path:
            if trains or (key == "model" and not getattr(config.evaluation, "models", ())):
                tree = read_model_folder(value.path, f"{key}.path")
                if key == "model":
                    refuse_no_weights(value)
                    refuse_no_tokenizer(value.tokenizer or value.path)
                    check_sizes(config, tree, trains=trains)
        elif isinstance(value, DataSetConfig) and f"{key}.source" not in skip:
            parts = value.parts if isinstance(value, PromptsConfig) else [value]
            for number, data_set in enumerate(parts):
                in_mixture = isinstance(value, PromptsConfig) and value.sources
                _check_data(data_set, f"{key}.sources[{number}]" if in_mixture else key)
        elif is_own(value) and key.rpartition(".")[2] in CODE:
            check_own_code(str(value), key)


def check_sizes(config: AnyConfig, tree: dict[str, Any], *, trains: bool) -> None:
    """Raise `ValueError` if the sizes in config.json, `tree`, do not suit the recipe. What it lacks
    or has under another name is left to the whole checks.
    """
    with contextlib.suppress(AttributeError, TypeError):
        text: Any = SimpleNamespace(**(tree.get("text_config") or tree))
        text.get_text_config = lambda: text
        if trains:
            refuse_sizes(text, config.training.layout.tensor)
        if not isinstance(config, RunConfig):
            return
        if trains and not is_own(config.rollout.engine.kind):
            check_engine_tensor(text, config.rollout.engine.tensor)
        new, limit = config.rollout.max_new_tokens, text.max_position_embeddings
        require(
            new < limit,
            f"rollout.max_new_tokens is {new}, but the max_position_embeddings of model.path is"
            f" {limit}; lower it",
        )


def _settings(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of the sections and texts of a configuration. A key of an open map that
    names a function is a text of the map.
    """
    yield key, tree
    if isinstance(tree, Config):
        if not isinstance(tree, DataSetConfig):
            for name, value in tree:
                yield from _settings(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if is_own(name):
                yield key, name
            yield from _settings(value, f"{key}.{name}")
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _settings(value, key)


def _check_data(section: Any, setting: str) -> None:
    """Raise `ValueError` if a data set's file is missing, or its first row lacks a column. Folders,
    large files, data sets of the hub and rows from programs are left to the complete checks.
    """
    path = Path(section.source)
    is_file_name = format_of(path) or path.exists() or glob.has_magic(section.source)
    is_large = path.is_file() and path.stat().st_size > LARGE_BYTES
    is_generated = section.source.partition(":")[0] in SOURCES
    if not section.source or is_generated or path.is_dir() or is_large:
        return
    if not is_file_name:  # perhaps of the hub
        refuse_no_folder(section.source, f"{setting}.source")
        return
    with contextlib.redirect_stderr(io.StringIO()):  # the complete checks print the row format
        table = read_rows(section.source, section.split, 1, setting)
        section, table = as_read(section, table, setting)
    cells = Cells(section, setting, table.rows[0], table.places[0])
    for name in _columns(section):
        cells.value(name)


def _columns(section: DataSetConfig) -> list[str]:
    """The settings that name columns which every row must have."""
    if isinstance(section, PromptsConfig):
        names = ["answer_column", "choices_column", "environment_column"]
        return ["prompt_column", *(name for name in names if getattr(section, name))]
    if isinstance(section, DemonstrationsConfig):
        whole = [name for name in ("messages_column", "text_column") if getattr(section, name)]
        return whole or ["prompt_column", "response_column"]
    assert isinstance(section, PreferencesConfig), section
    if section.response_column:
        return ["response_column", "label_column"]
    margin = ["margin_column"] if section.margin_column else []
    return ["chosen_column", "rejected_column", *margin]


def check_own_code(name: str, setting: str) -> None:
    """Raise `ValueError` if the Python file of `name`, `path/to/file.py:attribute`, cannot be read
    or parsed, or nowhere spells the attribute; its code is not run.
    """
    path, attribute = split_name(name, setting)
    try:
        content = path.read_bytes()
        compile(content, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; set another file") from None
    except (SyntaxError, ValueError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{setting}: {path} does not import: {text}; mend the file") from None
    text = unicodedata.normalize("NFKC", content.decode(errors="replace"))
    spelled = unicodedata.normalize("NFKC", attribute)
    public = re.findall(r"^(?:async )?(?:def|class) ([^\W_]\w*)", text, re.MULTILINE)
    noun = "class" if setting in CLASSES else "function"
    require(
        any(word in text for word in (spelled, *DYNAMIC)),
        f"{setting}: {path} has no {noun} '{attribute}'; set one of:"
        f" {', '.join(public) or '(none)'}",
    )
