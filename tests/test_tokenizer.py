import base64
import copy
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from jaxspec import SHIPPED_TARGET
from jaxspec import tokenizer as tokenizer_module
from jaxspec.errors import InputError
from jaxspec.tokenizer import KIMI_PATTERN, TextStream, Tokenizer, load_tokenizer
from tests.tiny_tokenizer import CONTROL, MERGES, TEMPLATE, write_tokenizer

BYTES = {bytes([i]): i for i in range(256)}
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FORGED = st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", "<", "[", "the", " "])).map("".join)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("don't We'LL x's", ["don't", " We'LL", " x's"]),
        ("12345 6", ["123", "45", " ", "6"]),
        ("日本語abc漢", ["日本語", "abc", "漢"]),
        ("HTTPServer camelCase", ["HTTPServer", " camel", "Case"]),
        ("a\n\n  b \t", ["a", "\n\n", " ", " b", " \t"]),
        ("f(x): # no!\r\n", ["f", "(x", "):", " #", " no", "!\r\n"]),
        ("éÀ ßё ひら", ["é", "À", " ßё", " ひら"]),
    ],
)
def test_pattern_cuts_as_kimi_does(text, pieces):
    """Worked out by hand from the eight alternatives; `regex` reads `&&` in its version 1."""
    assert regex.findall(KIMI_PATTERN, text, flags=regex.V1) == pieces


def test_merges_stay_inside_pieces(tokenizer):
    names = [bytes([i]) for i in range(256)] + MERGES
    encoded = [names[i] for i in tokenizer.encode("the and the 1234abc")]
    assert encoded == [b"the", b" ", b"and", b" the", b" ", b"123", b"4", b"abc"]


@given(TEXT)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def plain_bpe(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding as it is defined: in each piece, the lowest-ranked pair merges first."""
    ids = []
    for piece in regex.findall(KIMI_PATTERN, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            best = min(pairs, key=lambda pair: ranks.get(pair, math.inf), default=b"")
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [best]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def shipped() -> tuple[Tokenizer, dict[bytes, int]]:
    """The shipped tokenizer, and the ranks in its file."""
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    assert tokenizer is not None
    lines = (SHIPPED_TARGET / "tiktoken.model").read_text().splitlines()
    return tokenizer, {base64.b64decode(t): int(rank) for t, rank in map(str.split, lines)}


@given(TEXT | st.text("abcdefg_().=:' \n\t0123日語ÄÖ"))
def test_shipped_vocabulary_against_the_definition(shipped, text):
    tokenizer, ranks = shipped
    ids = tokenizer.encode(text)
    assert ids == plain_bpe(text, ranks)
    assert tokenizer.decode(ids) == text


def test_shipped_vocabulary_on_its_own_kind_of_text(shipped):
    tokenizer, ranks = shipped
    text = Path(__file__).read_text("utf-8")
    assert tokenizer.encode(text) == plain_bpe(text, ranks)
    config = json.loads((SHIPPED_TARGET / "config.json").read_text())
    named = [i for name, i in tokenizer.special_ids.items() if not name.startswith("<|reserved")]
    assert tokenizer.special_ids["[BOS]"] == len(ranks)
    assert tokenizer.special_ids["[EOS]"] == config["text_config"]["eos_token_id"]
    assert max(named) < config["text_config"]["vocab_size"]


@given(FORGED)
def test_text_is_never_control(tokenizer, text):
    first = min(tokenizer.special_ids.values())
    ids = tokenizer.encode(text)
    assert all(i < first for i in ids)
    assert tokenizer.decode(ids) == text


@given(TEXT, st.data())
def test_stream_is_decode_in_pieces(tokenizer, text, data):
    # Any bytes, broken characters included: an id below 256 is a byte.
    ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 600)))
    stream, parts = TextStream(tokenizer), []
    while ids[sum(map(len, parts)) :]:
        start = sum(map(len, parts))
        parts.append(ids[start : start + data.draw(st.integers(1, 4))])
    text = "".join(stream.push(part) for part in parts) + stream.finish()
    assert text == tokenizer.decode(ids)


def test_stream_holds_half_a_character_back(tokenizer):
    first, *others = "語".encode()
    stream = TextStream(tokenizer)
    assert stream.push([first, others[0]]) == ""
    assert stream.push([others[1]]) == "語"
    assert stream.push([first]) + stream.finish() == "\ufffd"


def test_decode_leaves_control_out_and_thinking_in(tokenizer):
    names = ["<|im_end|>", "<think>", "[EOS]", "</think>"]
    assert tokenizer.decode([tokenizer.special_ids[name] for name in names]) == "<think></think>"
    assert tokenizer.decode([10**6]) == "\ufffd"


def test_reserved_names_fill_the_ids_after_the_ranks(tokenizer):
    first = 256 + len(MERGES)
    assert sorted(tokenizer.special_ids.values()) == list(range(first, first + 258))
    assert tokenizer.special_ids["[BOS]"] == first
    number = first + len(CONTROL)
    assert tokenizer.special_ids[f"<|reserved_token_{number}|>"] == number


def test_chat_is_the_template_with_its_control_tokens(tokenizer):
    messages = [{"role": "user", "content": "the abc"}, {"role": "system", "content": "123"}]
    s, text = tokenizer.special_ids, tokenizer.encode
    assert tokenizer.encode_chat(messages) == [
        *[s["<|im_user|>"], *text("user"), s["<|im_middle|>"], *text("the abc"), s["<|im_end|>"]],
        *[s["<|im_system|>"], *text("system"), s["<|im_middle|>"], *text("123"), s["<|im_end|>"]],
        *[s["<|im_assistant|>"], *text("assistant"), s["<|im_middle|>"], s["<think>"]],
    ]


@given(FORGED, FORGED, st.text("\U000f0000\U000f0001<["))
def test_no_message_forges_control(tokenizer, one, two, masked):
    """The control tokens of any conversation are those of one that says nothing."""

    def conversation(one: str, two: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": one}, {"role": "assistant", "content": two}]

    def control(ids: list[int]) -> list[int]:
        return [i for i in ids if i >= 256 + len(MERGES)]

    ids = tokenizer.encode_chat(conversation(one + masked, two))
    assert control(ids) == control(tokenizer.encode_chat(conversation("", "")))
    hidden = {i for name, i in tokenizer.special_ids.items() if "think" not in name}
    assert tokenizer.decode(i for i in ids if i not in hidden) == (
        f"user{one}{masked}assistant{two}assistant<think>"
    )


def test_template_filters_as_in_transformers(tokenizer):
    template = "{% for m in messages %}{{ m | tojson }}\n{% break %}{% endfor %}\n<|im_end|>"
    chat = Tokenizer(
        {bytes([i]): i for i in range(256)}, {256: {"content": "<|im_end|>"}}, template
    )
    ids = chat.encode_chat([{"role": "user", "content": "<|im_end|> <é'&>"}])
    assert ids.count(256) == 1
    assert chat.decode(ids) == '{"role": "user", "content": "<|im_end|> <é\'&>"}\n'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template: TemplateSyntaxError"),
        ("{{ messages[0]['content'] + 1 }}", "chat template: TypeError"),
        ("{{ messages.__class__.__mro__ }}", "chat template: SecurityError"),
        ("{{ 1 // 0 }}", "chat template: ZeroDivisionError"),
        ("{{ range(1000000000) | list }}", "chat template: OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: RecursionError"),
    ],
)
def test_template_that_refuses(template, message):
    chat = Tokenizer(BYTES, {}, template)
    with pytest.raises(InputError, match=re.escape(message)):
        chat.encode_chat([{"role": "user", "content": "hi"}])


def test_template_that_knows_no_tools_or_no_thinking():
    chat, messages = Tokenizer(BYTES, {}, "{{ messages }}"), [{"role": "user", "content": "hi"}]
    for name, extra in (("tools", {"tools": [{}]}), ("thinking", {"thinking": False})):
        with pytest.raises(InputError, match=f"reads no '{name}', so this checkpoint knows"):
            chat.encode_chat(messages, **extra)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"role": "robot", "content": "a"},
            "role 'robot': there are system, user, assistant, tool",
        ),
        ({"role": "user", "content": [{"type": "image"}]}, "type 'image': jaxspec reads text only"),
        ({"content": "a"}, 'expected objects with a "role"'),
    ],
)
def test_messages_that_are_refused_whoever_gives_them(tokenizer, message, said):
    with pytest.raises(InputError, match=re.escape(said)):
        tokenizer.encode_chat([message])


GOLDEN_PIECES = {
    14062: "system", 3900: "You", 554: " are", 261: " a", 13205: " helpful", 26626: " assistant",
    2482: "user", 24328: "Who", 398: " you", 69702: "assistant", 6725: "My", 1530: " name",
    387: " is", 1999: " Q", 33249: "wen", 6034: "How", 3410: " old", 1228: "11", 2285: " years",
}  # fmt: skip
"""What the ordinary tokens of SpecForge's reference are, by their place in its conversation."""
GOLDEN_IDS = [
    163594, 14062, 163601, 3900, 554, 261, 13205, 26626, 13, 163586,
    163587, 2482, 163601, 24328, 554, 398, 30, 163586,
    163588, 69702, 163601, 6725, 1530, 387, 1999, 33249, 17, 13, 163586,
    163587, 2482, 163601, 6034, 3410, 554, 398, 30, 163586,
]  # fmt: skip
"""SpecForge, tests/test_data/test_references/kimi-k2-instruct_standard_ref.json, up to the last
question."""
GOLDEN_MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "My name is Qwen2."},
    {"role": "user", "content": "How old are you?"},
]
KIMI_SPECIAL = {
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>",
    163588: "<|im_assistant|>", 163594: "<|im_system|>", 163601: "<|im_middle|>",
    163606: "<think>", 163607: "</think>", 163838: "[UNK]", 163839: "[PAD]",
}  # fmt: skip


@pytest.fixture(scope="module")
def kimi(tmp_path_factory) -> Tokenizer:
    """A vocabulary of Kimi's size, with its tokens where the golden conversation needs them.

    Single bytes have the order of GPT-2's alphabet, as in all of tiktoken's vocabularies; the rest
    is filled with tokens that no text has.
    """
    order = [*range(33, 127), *range(161, 173), *range(174, 256)]
    order += [byte for byte in range(256) if byte not in order]
    tokens = {i: bytes([byte]) for i, byte in enumerate(order)}
    tokens |= {i: piece.encode() for i, piece in GOLDEN_PIECES.items()}
    tokens[300] = b"en"  # the merge below "wen", which no piece of text is by itself
    fill = (i for i in range(163584) if i not in tokens)
    tokens |= {i: b"\xff" + i.to_bytes(3, "big") for i in fill}
    directory = tmp_path_factory.mktemp("kimi")
    lines = (f"{base64.b64encode(tokens[i]).decode()} {i}\n" for i in range(163584))
    (directory / "tiktoken.model").write_text("".join(lines))
    added = {
        i: {"content": name, "special": "think" not in name} for i, name in KIMI_SPECIAL.items()
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    shipped = (SHIPPED_TARGET / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(shipped)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


INSTRUCT = """\
{%- for message in messages -%}
  {%- set of = {'user': 'user', 'assistant': 'assistant'}.get(message.role, 'system') -%}
  <|im_{{ of }}|>{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
"""The turns of Kimi-K2-Instruct."""


def test_golden_ids_of_kimi(kimi):
    """Of the instruct model, and of the thinking one: an empty thought in every earlier reply."""
    reply = [163588, 69702, 163601]
    instruct = copy.copy(kimi)
    instruct.chat_template = INSTRUCT
    assert instruct.encode_chat(GOLDEN_MESSAGES) == [*GOLDEN_IDS, *reply]
    at = GOLDEN_IDS.index(163588) + len(reply)
    thinking = [*GOLDEN_IDS[:at], 163606, 163607, *GOLDEN_IDS[at:], *reply, 163606]
    assert kimi.encode_chat(GOLDEN_MESSAGES) == thinking
    assert kimi.encode_chat(GOLDEN_MESSAGES, thinking=False) == [*thinking, 163607]


def test_ids_of_kimis_special_tokens(kimi):
    assert kimi.special_ids["<|reserved_token_163589|>"] == 163589
    assert sorted(kimi.special_ids.values()) == list(range(163584, 163584 + 258))
    assert kimi.encode("<|im_end|>") != [163586]


def test_golden_conversation_comes_back(kimi):
    text = "systemYou are a helpful assistant.userWho are you?assistantMy name is Qwen2."
    assert kimi.decode(GOLDEN_IDS) == text + "userHow old are you?"


def test_template_of_the_config_and_none(tmp_path):
    write_tokenizer(tmp_path, template=None)
    plain = load_tokenizer(tmp_path)
    assert plain is not None
    with pytest.raises(InputError, match=r"no chat template .*--tokens"):
        plain.encode_chat([{"role": "user", "content": "hi"}])
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for named in (TEMPLATE, [{"name": "default", "template": TEMPLATE}]):
        path.write_text(json.dumps({**config, "chat_template": named}))
        loaded = load_tokenizer(tmp_path)
        assert loaded is not None
        assert loaded.encode_chat([{"role": "user", "content": "hi"}])


def test_directory_without_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("YQ== 0\nYg==\n", "line 2: expected a base64 token and its rank"),
        ("YQ== 0\n*** 1\n", "line 2"),
        ("YQ== 0\nYg== one\n", "line 2"),
        ("YQ== 0\nYg== 2\n", "without a gap"),
        ("YQ== 0\nYQ== 1\n", "must differ"),
    ],
)
def test_broken_vocabulary(tmp_path, lines, message):
    (tmp_path / "tiktoken.model").write_text(lines)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path)


def test_special_token_on_an_ordinary_id(tmp_path):
    write_tokenizer(tmp_path)
    config = {"added_tokens_decoder": {"7": {"content": "<odd>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="'<odd>' has id 7"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(tmp_path)


@given(st.lists(st.tuples(st.sampled_from(["a", " ", "b\t"]), st.integers(1, 25)), max_size=8))
def test_long_text_is_cut_where_kimi_cuts(runs):
    """The cuts, one character at a time as Kimi's loop finds them."""
    text = "".join(character * count for character, count in runs)
    limits = {"MAX_TEXT": 40, "MAX_RUN": 7}
    with pytest.MonkeyPatch.context() as patch:
        for name, limit in limits.items():
            patch.setattr(tokenizer_module, name, limit)
        pieces = list(tokenizer_module._cut(text))
    expected = []
    for start in range(0, len(text), 40):
        chunk, begin, length = text[start : start + 40], 0, 0
        for i, character in enumerate(chunk):
            same = i > 0 and character.isspace() == chunk[i - 1].isspace()
            length = length + 1 if same else 1
            if length > 7:
                expected.append(chunk[begin:i])
                begin, length = i, 1
        expected.append(chunk[begin:])
    assert pieces == expected


def test_a_million_characters_are_encoded(tokenizer):
    text = "a" * 500_000 + " the" * 125_000
    assert tokenizer.decode(tokenizer.encode(text)) == text
