"""Tokenizers: a Hugging Face folder or hub name, or a SentencePiece `.model` file made into a fast
tokenizer with SentencePiece's ids.

    name --load_tokenizer--> tokenizer --check_tokenizer--> fit for `vocab_size` embeddings
"""

from __future__ import annotations

import contextlib
import inspect
import re
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.hub import hub_state, is_hub_name, why_absent
from megarl.settings.schema import require
from megarl.system.third_party import opening, refuse_broken_links

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_KNOWN = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which a tokenizer's folder has at least one."""
FILE = "tokenizer.json"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
PROBE = (
    "What is 0 plus one?\n\n  D\u00e9j\u00e0 vu, No. 1234567 + 89.5 =\tdef f(x):\r\n        return"
    " x[0] != 'it's'  # \u4f60\u597d\uff0c\u4e16\u754c \uff21 \ufb01 \U0001f600 </b>\n"
)
"""Text on which two tokenizers are compared: spaces, new lines, digits, accents, code, CJK."""
_TEXT_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "tekken.json", "tokenization_*.py"),
    *("chat_template*", "additional_chat_templates/*"),
)
"""Patterns of the names of a tokenizer's files, chat templates included."""
_FILES: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[str, bytes]]]
_FILES = weakref.WeakKeyDictionary()
"""{loaded tokenizer: (what could be changed since, the files that it was loaded from)}"""
UNIGRAM, BPE, CHAR = 1, 2, 4  # TrainerSpec.ModelType of a SentencePiece file
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # ModelProto.SentencePiece.Type
SPACE = "\u2581"  # how SentencePiece writes a space


def refuse_no_tokenizer(name: str) -> bool:
    """Whether the tokenizer `name` is a folder or file, and no hub name. Raises `ValueError` if it
    should be and is not there.
    """
    require(
        bool(name),
        "the tokenizer's name is empty; set it to a model folder, a hub name or a SentencePiece"
        " .model file",
    )
    path = Path(name)
    if path.suffix == ".model":
        require(
            path.is_file(),
            f"SentencePiece file {path} does not exist; set the path of a .model file",
        )
        return True
    # What looks like a path is never asked of the hub.
    local = path.exists() or not is_hub_name(name)
    if local:
        require(
            path.is_dir(),
            f"tokenizer folder {path} does not exist; set the path of a folder with a"
            " tokenizer.json",
        )
        refuse_broken_links(path)
        require(
            any((path / file).is_file() for file in _KNOWN),
            f"folder {path} holds no tokenizer (none of {', '.join(_KNOWN)}); copy the"
            " tokenizer's files into it, or set a folder that has them",
        )
    return local


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a transformers tokenizer from a local folder, a hub name (`owner/name`) or a
    SentencePiece `.model` file. Raises `ValueError` with advice if there is none, it does not load,
    or it needs code of its own and `trust_remote_code` is False.
    """
    local = refuse_no_tokenizer(name)
    if Path(name).suffix == ".model":
        return _from_sentencepiece(Path(name))
    only_local = local or hub_state() != "online"
    fix = "fetch it again" if local else f"'{name}' is not on this machine {why_absent(name)}"
    try:
        with opening(f"the tokenizer '{name}' does not load", fix=fix):
            loaded = _from_folder(name, only_local, trust_remote_code)
            _FILES[loaded] = (_state(loaded), _text_files(name))
            return loaded
    except ValueError as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"tokenizer '{name}' needs code of its own; read that code, then set"
                " trust_remote_code to true"
            ) from error
        raise


def source_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """{path in a folder: content} of the files that `load_tokenizer` loaded `tokenizer` from; empty
    if it was changed since.
    """
    state, files = _FILES.get(tokenizer, ((), {}))
    return files if state == _state(tokenizer) else {}


def _state(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """What may be set in a loaded tokenizer."""
    return len(tokenizer), dict(tokenizer.special_tokens_map), tokenizer.chat_template


def _text_files(name: str) -> dict[str, bytes]:
    """{path in the folder: content} of a tokenizer's files, in a folder or the hub's cache."""
    from transformers.utils.hub import cached_file

    quiet = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    file = next(filter(None, (cached_file(name, file, **quiet) for file in _KNOWN)))
    folder = Path(file).parent
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in _TEXT_FILES
        for path in folder.glob(pattern)
        if path.is_file()
    }


def _from_folder(name: str, only_local: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Raises `ValueError` if transformers makes other ids
    than its tokenizer.json.

    transformers 5 builds the splitting rules from the tokenizer's class and takes only the words
    from tokenizer.json: the byte-level file of DeepSeek's distilled Llama, under
    LlamaTokenizerFast, loses every space.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils.hub import cached_file

    described = get_tokenizer_config(name, local_files_only=only_local)
    file = cached_file(
        name, FILE, local_files_only=only_local, _raise_exceptions_for_missing_entries=False
    )
    loaded: Any = None
    if file is None or described.get("auto_map"):
        loaded = AutoTokenizer.from_pretrained(
            name, local_files_only=only_local, trust_remote_code=trust_remote_code
        )
    if file is None:
        return loaded
    plain = Tokenizer.from_file(file)
    plain.no_truncation()
    plain.no_padding()
    ids = plain.encode(PROBE, add_special_tokens=False).ids
    if loaded is None or loaded.encode(PROBE, add_special_tokens=False) != ids:
        loaded = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=only_local)
        for role, token in _class_tokens(name, described, only_local).items():
            if getattr(loaded, role) is None and plain.token_to_id(str(token)) is not None:
                setattr(loaded, role, token)
    require(
        loaded.encode(PROBE, add_special_tokens=False) == ids,
        f"transformers makes other token ids than the file {FILE} itself; save the tokenizer"
        " again with the version of transformers that is installed",
    )
    return loaded


def _class_tokens(name: str, described: dict[str, Any], only_local: bool) -> dict[str, str]:
    """{role: special token} that the tokenizer's class has by default, without roles that
    `described`, the content of tokenizer_config.json, sets or removes.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto import tokenization_auto as auto

    class_name = described.get("tokenizer_class")
    if class_name is None:
        with contextlib.suppress(OSError):  # a folder without config.json
            model, _ = PreTrainedConfig.get_config_dict(name, local_files_only=only_local)
            class_name = auto.TOKENIZER_MAPPING_NAMES.get(model.get("model_type", ""))
    tokenizer_class = auto.tokenizer_class_from_name(class_name) if class_name else None
    parameters = inspect.signature(tokenizer_class.__init__).parameters if tokenizer_class else {}
    return {
        role: value.default
        for role, value in parameters.items()
        if role in ROLES and role not in described and value.default
    }


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, source: str) -> None:
    """Raise `ValueError` unless `tokenizer` has an end-of-sequence and a padding token, and its ids
    are below `vocab_size`. `source`: how the message names it.
    """
    require(
        tokenizer.eos_token_id is not None,
        f"tokenizer {source} has no end-of-sequence token, so no response could end; set eos_token"
        " in its tokenizer_config.json to the token that ends a reply",
    )
    require(
        tokenizer.pad_token_id is not None,
        f"tokenizer {source} has no padding token; set pad_token in its tokenizer_config.json, to"
        f" '{tokenizer.eos_token}' where no other token is free (a .model file: load it, set"
        " tokenizer.pad_token, save_pretrained to a folder, and set that folder)",
    )
    special: Any = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    size = max(len(tokenizer), *(token + 1 for token in special))
    require(
        size <= vocab_size,
        f"tokenizer {source} has {size} tokens, but the model embeds {vocab_size}; set the"
        " tokenizer that belongs to the model, or resize the model's embeddings to at least"
        f" {size}",
    )


def pad_apart(tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, source: str) -> None:
    """Change `tokenizer` in place so that its padding token never ends a scored text: Hugging
    Face's sequence classifiers take the score at the last token that is not padding. The padding
    token becomes the first that has no other use and an id below `vocab_size`: the present one, a
    reserved or unused special token, a new token, or another special token that does not end texts.

    Raises `ValueError` if no token fits. `source`: how the message names the tokenizer.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    known, bos, new = tokenizer.get_vocab(), tokenizer.bos_token, "<|pad|>"
    size = max(known.values()) + 1
    free = re.compile("pad|reserved|unused|placeholder", re.IGNORECASE)
    spare = [name for name in (tokenizer.pad_token, *filter(free.search, special)) if name != bos]
    # The new token before others, since programs that take every padding token for padding, in
    # spite of the attention mask, would leave out those of a text.
    for token in [*spare, new, bos, *special]:
        if token in (None, tokenizer.eos_token, tokenizer.unk_token):
            continue
        if str(token) in str(tokenizer.chat_template or ""):  # may end a turn
            continue
        if known.get(str(token), size) >= vocab_size:
            continue
        if token != tokenizer.pad_token:
            tokenizer.add_special_tokens({"pad_token": token})
        return
    raise ValueError(
        f"tokenizer {source} has no token to pad with that cannot end a text: its padding token"
        f" {tokenizer.pad_token!r} can, by which transformers would find a wrong last token, and"
        f" its other special tokens end texts too; add a special token as pad_token, and resize the"
        f" model's embeddings to at least {size + 1}"
    )


def _from_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """A fast tokenizer with the ids and special tokens of a SentencePiece file."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers import PreTrainedTokenizerFast

    schema: Any = sentencepiece_model_pb2  # its classes are made while it is imported
    model = schema.ModelProto()
    with opening(f"{path} is not a SentencePiece model", fix="set a file written by its trainer"):
        model.ParseFromString(path.read_bytes())
        require(model.pieces, "it has no pieces")
    spec = model.trainer_spec
    ids = {"unk": spec.unk_id, "bos": spec.bos_id, "eos": spec.eos_id, "pad": spec.pad_id}
    roles = {
        f"{role}_token": model.pieces[index].piece
        for role, index in ids.items()
        if 0 <= index < len(model.pieces)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_fast_tokenizer(model, path), clean_up_tokenization_spaces=False, **roles
    )


def _fast_tokenizer(model: Any, path: Path) -> Tokenizer:
    """A `tokenizers` pipeline equivalent to the SentencePiece `model`."""
    import tokenizers
    from tokenizers import decoders, normalizers

    spec, norm = model.trainer_spec, model.normalizer_spec
    require(
        spec.model_type in (UNIGRAM, BPE, CHAR),
        f"{path} is a SentencePiece model of type {spec.model_type} (words); train one of type"
        " unigram, bpe or char",
    )
    require(
        not spec.treat_whitespace_as_suffix,
        f"{path} was trained with treat_whitespace_as_suffix; train it without",
    )
    by_bytes: dict[str, Any] = {"byte_fallback": spec.byte_fallback}
    if spec.model_type == UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in model.pieces]
        built = tokenizers.models.Unigram(scores, unk_id=spec.unk_id, **by_bytes)
    else:
        vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
        merges = _merges(model) if spec.model_type == BPE else []
        by_bytes |= {"unk_token": model.pieces[spec.unk_id].piece, "fuse_unk": True}
        built = tokenizers.models.BPE(vocabulary, merges, **by_bytes)
    fast = tokenizers.Tokenizer(built)
    charsmap, prefix = norm.precompiled_charsmap, norm.add_dummy_prefix
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if norm.remove_extra_whitespaces:
        # With a prefix, one leading space stays and stands for it: Metaspace puts none where one
        # is.
        steps += [
            normalizers.Strip(left=not prefix),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    elif prefix:
        # SentencePiece puts its leading space before one that is there already; Metaspace would
        # not.
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A "), "  "))
    if steps:
        fast.normalizer = normalizers.Sequence(steps)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    parts: list[Any] = [decoders.Replace(SPACE, " ")]
    parts += [decoders.ByteFallback()] if spec.byte_fallback else []
    parts += [decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if prefix else []
    fast.decoder = decoders.Sequence(parts)
    fast.add_tokens(
        [
            tokenizers.AddedToken(
                piece.piece, normalized=False, special=piece.type in (CONTROL, UNKNOWN)
            )
            for piece in model.pieces
            if piece.type in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return fast


def _merges(model: Any) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE `model` by priority. SentencePiece stores none: it joins
    the pair that gives the piece with the highest score.
    """
    index = {
        piece.piece: number for number, piece in enumerate(model.pieces) if piece.type == NORMAL
    }
    ranked = sorted(
        (-model.pieces[number].score, index[text[:cut]], index[text[cut:]], text[:cut], text[cut:])
        for text, number in index.items()
        for cut in range(1, len(text))
        if text[:cut] in index and text[cut:] in index
    )
    return [(left, right) for *_, left, right in ranked]
