"""Trains the byte-level BPE that ships with the mini target, in Kimi's own file format.

Written files: `tiktoken.model` (base64 bytes and rank per line) and `tokenizer_config.json` (the
special tokens under Kimi's names, on the ids after the last rank).
"""

import base64
import json
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

# Kimi's pre-tokenisation: `&&` is class intersection, in tiktoken's regex as in Oniguruma's.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Kimi's special tokens by their offset from the first id after the ranks (its ids 163584...); Kimi
# keeps 256 such ids with [UNK] and [PAD] last, this vocabulary 32, in the same order.
NUM_SPECIAL = 32
_NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    30: "[UNK]",
    31: "[PAD]",
}
_NOT_SKIPPED = {"<think>", "</think>"}  # part of the text, as in Kimi's repository


def special_tokens(num_base: int) -> dict[str, int]:
    """Returns name -> id of all special tokens of a vocabulary with `num_base` ranks."""
    named = {i: _NAMED.get(i, f"<|reserved_token_{num_base + i}|>") for i in range(NUM_SPECIAL)}
    return {name: num_base + i for i, name in named.items()}


def train_bpe(texts: list[str], num_base: int) -> list[bytes]:
    """Returns the `num_base` byte strings in rank order: the 256 bytes first, then the merges."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated"), byte_level]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_base, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # ByteLevel shows every byte as one printable character: printable bytes as themselves, the
    # others as 256, 257, ... in order. Undo that.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    to_byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [rank for _, rank in vocab] == list(range(num_base))
    return [bytes(to_byte[c] for c in token) for token, _ in vocab]


def encoding(ranks: list[bytes]) -> tiktoken.Encoding:
    """Returns the tiktoken encoding that Kimi's own tokenizer class would build from the ranks."""
    return tiktoken.Encoding(
        "mini-kimi",
        pat_str=KIMI_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens=special_tokens(len(ranks)),
    )


def write(ranks: list[bytes], directory: Path) -> None:
    """Writes `tiktoken.model` and `tokenizer_config.json` into an existing directory."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (directory / "tiktoken.model").write_text("".join(lines))
    decoder = {
        str(id_): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _NOT_SKIPPED,
        }
        for name, id_ in special_tokens(len(ranks)).items()
    }
    config = {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1024,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def read(directory: Path) -> tiktoken.Encoding:
    """Returns the encoding stored in a directory's `tiktoken.model`."""
    lines = (directory / "tiktoken.model").read_text().splitlines()
    return encoding([base64.b64decode(line.split()[0]) for line in lines])
