"""Chat templates that mark turns as those of many families do, each with a tokenizer of one token a
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

SHOWN = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
CALLED = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
OLMO = Family(
    SHOWN + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLED +
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    end="<|im_end|>", eos="<|endoftext|>", others=("<|im_start|>",),
)  # fmt: skip
HARMONY = Family(
    SHOWN + "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    end="<|end|>", eos="<|return|>", others=("<|start|>", "<|message|>", "<|channel|>", "<|call|>"),
)  # fmt: skip
GLM = Family(
    "[gMASK]<sop>" + SHOWN + "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n"
    "{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}" + CALLED + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    end="<|user|>", eos="<|endoftext|>",
    others=("<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>"),
)  # fmt: skip
COHERE = Family(
    SHOWN + "{% for m in messages %}<|START|>{{ m.role }}:{% if m.role == 'assistant' %}<|RESPOND|>"
    "{{ m.content or '' }}" + CALLED + "<|RESPONDED|>{% else %}{{ m.content }}{% endif %}<|END|>"
    "{% endfor %}{% if add_generation_prompt %}<|START|>assistant:<|RESPOND|>{% endif %}",
    end="<|END|>", eos="<|END|>", others=("<|START|>", "<|RESPOND|>", "<|RESPONDED|>"),
)  # fmt: skip
LATE_TOOLS = Family(
    "{{ bos_token }}{% set ns = namespace(l=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.l = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.l %}[TOOLS]{{ tools | tojson }}"
    "[/TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]"
    "{{ m.content }}[/RESULT]{% else %} {{ m.content or '' }}" + CALLED + "</s>{% endif %}"
    "{% endfor %}",
    end="</s>", eos="</s>", bos="<s>",
    others=("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[RESULT]", "[/RESULT]"),
)  # fmt: skip
THINKS = Family(
    SHOWN + "{% set ns = namespace(l=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.l = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{% set said = m.content or '' %}{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.l %}<think>\n{{ said.split('</think>')[0].split('<think>')[-1] if"
    " '</think>' in said else '' }}\n</think>\n{% endif %}{{ said.split('</think>')[-1] }}"
    "{% else %}{{ said }}{% endif %}" + CALLED + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    end="<|im_end|>", eos="<|im_end|>", others=("<|im_start|>",),
)  # fmt: skip
OTHERS = {
    "olmo": OLMO, "harmony": HARMONY, "glm": GLM, "cohere": COHERE, "late tools": LATE_TOOLS,
    "thinks": THINKS,
}  # fmt: skip
"""Families that end turns, or write earlier ones, in ways of their own."""


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
