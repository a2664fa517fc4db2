"""Chat templates that mark turns as those of six families do, each with a tokenizer of one token a
byte and the family's special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    """The markup of a family of models."""

    template: str
    end: str
    """The special token that ends a turn of the model."""
    eos: str
    """The tokenizer's end-of-sequence token."""
    bos: str = ""
    """The token that the tokenizer puts before a text; empty for none."""
    others: tuple[str, ...] = ()
    """Other special tokens."""


CHATML = Family(
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    end="<|im_end|>", eos="<|endoftext|>", others=("<|im_start|>",),
)  # fmt: skip
LLAMA = Family(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    end="<|eot_id|>", eos="<|end_of_text|>", bos="<|begin_of_text|>",
    others=("<|start_header_id|>", "<|end_header_id|>"),
)  # fmt: skip
GEMMA = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    end="<end_of_turn>", eos="<eos>", bos="<bos>", others=("<start_of_turn>",),
)  # fmt: skip
MISTRAL = Family(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    end="</s>", eos="</s>", bos="<s>", others=("[INST]", "[/INST]"),
)  # fmt: skip
PHI = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    end="<|end|>", eos="<|endoftext|>", others=("<|user|>", "<|assistant|>", "<|system|>"),
)  # fmt: skip
GRANITE = Family(
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    end="<|end_of_text|>", eos="<|end_of_text|>", others=("<|start_of_role|>", "<|end_of_role|>"),
)  # fmt: skip
FAMILIES = {
    "chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "phi": PHI,
    "granite": GRANITE,
}  # fmt: skip


def tokenizer_of(family: Family, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte with the special tokens of a family, and its template or
    another one.
    """
    named = ["<pad>", family.eos, family.end, family.bos, *family.others]
    special = list(dict.fromkeys(token for token in named if token))
    words = {
        token: n for n, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    fast = Tokenizer(models.BPE(words, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    if family.bos:
        fast.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, words[family.bos])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        pad_token="<pad>",
        eos_token=family.eos,
        bos_token=family.bos or None,
        additional_special_tokens=[family.end, *family.others],
    )
    made.chat_template = template or family.template
    return made
