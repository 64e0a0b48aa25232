"""A tokenizer directory in Kimi's format, small enough to read: 256 bytes and a few merges."""

import base64
import json
from pathlib import Path

MERGES = [b"th", b"the", b" t", b" th", b" the", b"an", b"and", b" a", b"ab", b"abc", b"12", b"123"]
CONTROL = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"]
CONTROL += ["<|im_middle|>", "<think>", "</think>"]

# In the manner of Kimi-K2's: who speaks, in which role, what, and the reply begun.
TEMPLATE = """\
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>
  {%- else -%}
    <|im_system|>
  {%- endif -%}
  {{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think>
  {%- if thinking is defined and not thinking -%}</think>{%- endif -%}
{%- endif -%}
"""


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> int:
    """Writes the files into an existing directory; returns the id of the first control token."""
    tokens = [bytes([i]) for i in range(256)] + MERGES
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(tokens) + i): {"content": name, "special": "think" not in name}
        for i, name in enumerate(CONTROL)
    }
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return len(tokens)
