"""`megarl chat RUN|MODEL`: talk to a model, a trained one or any other, through a vLLM engine.

The newest checkpoint of a run folder (with --best the best one), a model folder or a hub name
answers, on the first GPU or the CPU. A model with a chat template is asked by it and sees the whole
conversation; a model without one goes on with each line as a text of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.settings.schema import require
from megarl.system import console

CONTEXT = 4096
"""Most tokens of a conversation; fewer if the model has fewer positions."""


def main(arguments: list[str]) -> int:
    """Print the model's answer to `--prompt`, or to each line of standard input. `arguments`: the
    words after `megarl chat`. Returns the exit code 0. Raises `UserError` for wrong options, for a
    model that cannot be read, and for a conversation that fills the context.
    """
    parser = console.Arguments("megarl chat")
    parser.add_argument("model")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--prompt")
    parser.add_argument("--system", default="")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.7)
    options = parser.parse_args(arguments)
    if options.max_tokens < 1 or not 0.0 <= options.temperature < 100.0:
        parser.error("--max-tokens is at least 1, and --temperature 0 to 100")
    model = model_of(options.model, best=options.best)
    console.say(f"loading {model}")
    with console.diverted():
        try:
            chat = Chat(model, options.max_tokens, options.temperature, options.system)
        except ValueError as error:
            raise UserError(str(error)) from error
    try:
        for line in questions(options.prompt):
            for piece in chat.reply(line):
                print(console.printable(piece), end="", flush=True)
            print(flush=True)
    except BrokenPipeError:  # nobody reads any more; nor may the end of Python write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def model_of(named: str, *, best: bool = False) -> str:
    """The folder or hub name to load a model from. `named`: a run folder, of which the model in the
    newest checkpoint is taken (with `best`, in the best one); or a model's folder or hub name,
    which is returned. Raises `UserError` for a run without such a checkpoint, or no such model.
    """
    from megarl.checkpoints.listing import checkpoint_of
    from megarl.data.hub import refuse_no_folder

    folder = Path(named).expanduser()
    if best or (folder / "checkpoints").is_dir():
        return str(checkpoint_of(folder, best=best) / "model")
    try:
        refuse_no_folder(str(folder), "megarl chat")
    except ValueError as error:
        raise UserError(str(error)) from None
    return str(folder) if folder.exists() else named


def questions(prompt: str | None) -> Iterator[str]:
    """What the user asks: `prompt` or, if it is None, every line of standard input that is not
    blank. In a terminal each line gets the prompt "> ", on standard error.
    """
    if prompt is not None:
        yield prompt
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


class Chat:
    """A conversation with a model through vLLM's engine in this process. Without a chat template,
    each question is a text of its own, which the model continues.
    """

    def __init__(self, path: str, max_tokens: int, temperature: float, system: str) -> None:
        """Load the model in the folder, or of the hub's name, `path`; an answer has at most
        `max_tokens` tokens. `system`: message at the start; "" for none. Raises `ValueError` if the
        model or its tokenizer cannot be read, or has no chat template for `system`. Sets the
        environment variables that vLLM reads.
        """
        import torch

        from megarl.data.chat_template import ChatTemplate, ends_of_turns
        from megarl.engines.vllm_arguments import engine_arguments, tokenizer_arguments
        from megarl.settings.rollout import EngineConfig
        from megarl.settings.training import ModelConfig
        from megarl.system.process_env import engine_environment
        from megarl.system.quick_imports import quick_imports
        from megarl.trainer import threads
        from megarl.trainer.model_config import positions
        from megarl.trainer.plan import plan_model, stop_tokens
        from megarl.trainer.precision import has_bfloat16

        config = ModelConfig(path=path)
        self._tokenizer, hf = plan_model(config)
        has_template = bool(self._tokenizer.chat_template)
        require(
            has_template or not system,
            "--system is set, but the model has no chat template to write it; leave --system out",
        )
        self._template = ChatTemplate(self._tokenizer) if has_template else None
        self._turns = [{"role": "system", "content": system}] if system else []
        self._context = min(positions(hf) or CONTEXT, CONTEXT)
        self._number, self._max_tokens = 0, max_tokens
        ends = ends_of_turns(self._tokenizer, "chat" if has_template else "none")
        on_cpu, num_threads = not torch.cuda.is_available(), threads.shared(1)
        os.environ |= engine_environment(on_cpu=on_cpu, num_threads=num_threads, kv_cache_gib=1)
        torch.set_num_threads(num_threads)
        with quick_imports():
            from vllm import EngineArgs, LLMEngine, SamplingParams
            from vllm.sampling_params import RequestOutputKind

        self._sampling = SamplingParams(
            temperature=temperature,
            stop_token_ids=stop_tokens(self._tokenizer, config, hf, ends),
            output_kind=RequestOutputKind.DELTA,
        )
        dtype = "float32" if on_cpu else "bfloat16" if has_bfloat16() else "float16"
        settings = engine_arguments(
            EngineConfig(dtype=dtype, max_num_sequences=1),
            model=path,
            max_tokens=self._context,
            trust_remote_code=False,
            seed=0,
            on_cpu=on_cpu,
        )
        with tokenizer_arguments(path) as text:
            arguments = EngineArgs(**settings | text, generation_config="vllm")
            self._engine = LLMEngine.from_engine_args(arguments)

    def reply(self, text: str) -> Iterator[str]:
        """Ask `text` and iterate over the pieces of the model's answer, in order, as the engine
        generates them. Read all pieces before the next call: only then does the answer become part
        of the conversation. Raises `UserError` if the conversation fills the context, or if the
        chat template refuses it.
        """
        from megarl.data.tokens import tokenised

        if self._template is None:
            ids = self._tokenizer(text).input_ids
        else:
            self._turns.append({"role": "user", "content": text})
            try:
                written = self._template.text(self._turns, "the conversation", asks=True)
            except ValueError as error:
                raise UserError(str(error)) from error
            (ids,) = tokenised(self._tokenizer, [written], add_special_tokens=False)
        if not ids:
            raise UserError(
                f"the model's tokenizer knows no character of {text!r:.80}; ask something else"
            )
        room = min(self._max_tokens, self._context - len(ids))
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, and the model sees {self._context}; begin"
                " a new one"
            )
        sampling, answer = self._sampling.clone(), ""
        sampling.max_tokens = room
        self._number += 1
        self._engine.add_request(str(self._number), {"prompt_token_ids": ids}, sampling)
        while self._engine.has_unfinished_requests():
            outputs: Any = self._engine.step()
            for output in outputs:
                answer += output.outputs[0].text
                yield output.outputs[0].text
        self._turns.append({"role": "assistant", "content": answer})
