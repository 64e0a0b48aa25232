import json
import re

import pytest

from jaxspec import SHIPPED_TARGET
from jaxspec.errors import InputError
from jaxspec.prompts import (
    EncodedPrompt,
    Prompt,
    check_prompts,
    encode_prompts,
    read_prompts,
    read_tokens,
)
from jaxspec.tokenizer import load_tokenizer
from tests.tiny_tokenizer import write_tokenizer


def read(tmp_path, *lines, name="prompts.txt"):
    path = tmp_path / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return read_prompts(path)


def test_plain_text_is_a_prompt_a_line(tmp_path):
    prompts = read(tmp_path, "def f(x):", '  {"a": 1}', "語")
    assert [(p.id, p.text) for p in prompts] == [
        ("0", "def f(x):"),
        ("1", '  {"a": 1}'),
        ("2", "語"),
    ]
    assert prompts[2].where == f"{tmp_path / 'prompts.txt'}, line 3"


def test_plain_text_without_a_last_newline_or_with_windows_ones(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert [prompt.text for prompt in read_prompts(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"prompt": "a"}, {"text": "a"}),
        ({"question": "2+2?", "answer": "4"}, {"text": "2+2?"}),
        ({"question_id": 81, "category": "writing", "turns": ["one", "two"]},
         {"id": "81", "category": "writing", "text": "one"}),
        ({"id": "m", "messages": [{"role": "user", "content": "hi"}]},
         {"id": "m", "messages": ({"role": "user", "content": "hi"},)}),
        ({"id": 7, "conversations": [
            {"from": "system", "value": "s"}, {"from": "human", "value": "h"},
            {"from": "gpt", "value": "g"}]},
         {"id": "7", "messages": ({"role": "system", "content": "s"},
                                  {"role": "user", "content": "h"})}),
        ({"messages": [{"role": "user", "content": "hi"}], "thinking": False,
          "tools": [{"type": "function"}]},
         {"messages": ({"role": "user", "content": "hi"},), "thinking": False,
          "tools": ({"type": "function"},)}),
        ({"prompt": "a", "sampling": {"temperature": 1, "stop": "x", "stop_ids": [3, 4]}},
         {"text": "a", "settings": {"temperature": 1, "stop": ("x",), "stop_ids": (3, 4)}}),
    ],
)  # fmt: skip
def test_json_forms(tmp_path, entry, expected):
    (prompt,) = read(tmp_path, json.dumps(entry))
    assert prompt == Prompt(**{"id": "0", **expected}, where=prompt.where)


def test_a_conversation_ends_before_the_reply_to_write(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (prompt,) = read(tmp_path, json.dumps({"messages": messages}))
    assert prompt.messages == tuple(messages[:3])


def test_json_lines_skip_blank_lines_and_are_known_by_name(tmp_path):
    prompts = read(tmp_path, '{"prompt": "a"}', "", '{"prompt": "b"}')
    assert [(p.id, p.text) for p in prompts] == [("0", "a"), ("2", "b")]
    with pytest.raises(InputError, match=r"p\.jsonl, line 1: not JSON"):
        read(tmp_path, "plain", name="p.jsonl")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no prompt in it"),
        (["a", "", "b"], "line 2: empty prompt"),
        (["a", "  "], "line 2: empty prompt"),
        (['{"prompt": "a"}', '{"prompt": ""}'], "line 2, 'prompt': empty prompt"),
        (['{"prompt": 3}'], "line 1, 'prompt': expected text, found 3"),
        (['{"prompt": "a"}', '{"text": "b"}'], "line 2: expected one of the keys prompt, messages"),
        (['{"prompt": "a"}', "b"], "line 2: not JSON"),
        (['{"prompt": "a"}', '["b"]'], 'line 2: expected an object, found ["b"]'),
        (['{"turns": []}'], "line 1, 'turns': empty prompt"),
        (['{"turns": "x"}'], "line 1, 'turns': expected a list"),
        (['{"messages": [{"content": "a"}]}'], 'expected objects with a "role"'),
        (['{"messages": [{"role": "user", "content": ""}]}'], "empty prompt"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}'], "the assistant's turns alone"),
        (['{"conversations": [{"from": "robot", "value": "a"}]}'], "found 'robot'"),
        (
            ['{"messages": [{"role": "robot", "content": "a"}]}'],
            "'messages': role 'robot': there are system, user, assistant, tool",
        ),
        (
            ['{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'],
            "'messages': content of type 'image_url': jaxspec reads text only",
        ),
        (
            ['{"messages": [{"role": "user", "content": [{"type": "text"}]}]}'],
            'content: expected text, or parts with a "type" and a "text"',
        ),
        (['{"messages": [{"role": "user", "content": 3}]}'], "content: expected text"),
        (
            ['{"messages": [{"role": "user", "content": "a"}], "tools": "b"}'],
            "line 1, 'tools': expected a list",
        ),
        (
            ['{"messages": [{"role": "user", "content": "a"}], "thinking": "no"}'],
            "line 1, 'thinking': expected true or false, found \"no\"",
        ),
        (
            ['{"prompt": "a", "sampling": {"top_kk": 1}}'],
            "line 1, 'sampling': no setting 'top_kk'; there are temperature, top_k",
        ),
        (
            ['{"prompt": "a", "sampling": {"top_k": 1.5}}'],
            "line 1, 'sampling', 'top_k': expected an integer, found 1.5",
        ),
        (['{"prompt": "a", "sampling": {"temperature": true}}'], "expected a number, found true"),
        (['{"prompt": "a", "sampling": {"stop": [3]}}'], "expected text, or a list of texts"),
        (['{"prompt": "a", "sampling": [1]}'], "'sampling': expected an object, found [1]"),
        (['{"prompt": "a", "id": 1}', '{"prompt": "b"}'], "line 2: id '1' is also that of"),
    ],
)
def test_bad_prompt_files(tmp_path, lines, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        read(tmp_path, *lines)
    assert str(error.value).startswith(str(tmp_path / "prompts.txt"))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"absent\.txt: cannot be read"):
        read_prompts(tmp_path / "absent.txt")
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.txt: not UTF-8"):
        read_prompts(path)


def test_token_lists(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[[1, 2], [3]]")
    prompts = read_tokens(path)
    assert [(p.id, p.ids) for p in prompts] == [("0", (1, 2)), ("1", (3,))]
    assert encode_prompts(prompts, None) == [
        EncodedPrompt("0", (1, 2), where=f"{path}, entry 0"),
        EncodedPrompt("1", (3,), where=f"{path}, entry 1"),
    ]


def test_prompts_that_the_target_cannot_take():
    prompts = [EncodedPrompt("0", (1, 2)), EncodedPrompt("1", (3, -1), where="t.json, entry 1")]
    check_prompts(prompts[:1], vocab_size=3, context_length=3)
    with pytest.raises(InputError, match=r"t\.json, entry 1: token id -1, .* ids 0 to 8"):
        check_prompts(prompts, vocab_size=9, context_length=9)
    with pytest.raises(InputError, match=r"the prompt: token id 2, .* ids 0 to 1"):
        check_prompts(prompts, vocab_size=2, context_length=9)
    long = [prompts[0], EncodedPrompt("1", (1, 2, 3))]
    with pytest.raises(InputError, match=r"the prompt: 2 tokens .* context of 2; raise --context"):
        check_prompts(long, vocab_size=9, context_length=2)
    check_prompts(long, vocab_size=9, context_length=3)  # the second one fails alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "entry 0: expected a list of token ids, found 1"),
        ("[[1], []]", "entry 1: empty prompt"),
        ("[[1.5]]", "entry 0: expected a list of token ids"),
        ("[[true]]", "entry 0: expected a list of token ids"),
        ("[]", "expected a list of lists"),
        ('{"tokens": [1]}', "expected a list of lists"),
        ("[[1]", "not JSON"),
    ],
)
def test_bad_token_lists(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        read_tokens(tmp_path / "t.json")


def test_encoding_of_each_kind(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    messages = ({"role": "user", "content": "the"},)
    text, chat = Prompt("0", text="the"), Prompt("1", messages=messages)
    rendered = tuple(tokenizer.encode_chat(list(messages)))
    plain, from_chat = encode_prompts([text, chat], tokenizer)
    assert plain == EncodedPrompt("0", tuple(tokenizer.encode("the")))
    assert from_chat.ids == rendered
    assert encode_prompts([text], tokenizer, use_chat=True)[0].ids == rendered


def test_thinking_is_the_prompts_own_or_the_runs(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    messages = ({"role": "user", "content": "the"},)
    prompts = [Prompt(str(on), messages=messages, thinking=on) for on in (None, True, False)]

    def encoded(thinking: bool | None) -> list[str]:
        """What each of them ends in."""
        found = encode_prompts(prompts, tokenizer, thinking=thinking)
        return ["off" if tokenizer.piece(p.ids[-1]) == "</think>" else "on" for p in found]

    assert encoded(None) == ["on", "on", "off"]
    assert encoded(False) == ["off", "on", "off"]
    for wrong in (Prompt("0", text="a", thinking=True), Prompt("0", ids=(1,), tools=({},))):
        with pytest.raises(InputError, match="read by a chat template: give messages, or --chat"):
            encode_prompts([wrong], tokenizer)


def test_text_that_cannot_be_encoded():
    with pytest.raises(InputError, match=r"the prompt: the target's directory has no tiktoken"):
        encode_prompts([Prompt("0", text="a")], None)
    with pytest.raises(InputError, match="the prompt: empty prompt"):
        encode_prompts([Prompt("0", text=" ")], None)
    with pytest.raises(InputError, match="the prompt: neither text nor messages"):
        encode_prompts([Prompt("0")], load_tokenizer(SHIPPED_TARGET))


def test_what_is_no_unicode_is_refused():
    """Python makes half a surrogate pair of a byte on the command line that is not UTF-8."""
    for text in ("caf\udce9", json.loads('"\\ud83d"')):
        with pytest.raises(InputError, match=r"the prompt: text that is not Unicode.*surrogates"):
            encode_prompts([Prompt("0", text=text)], load_tokenizer(SHIPPED_TARGET))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "temperature": 5}', "'temperature' stands beside the prompt"),
        ('{"prompt": "a", "messages": []}', "both 'prompt' and 'messages'"),
        ('{"prompt": "a", "thinking": true}', "stand beside 'messages', not 'prompt'"),
        ('{"prompt": "a", "samplin": {}}', "nothing reads 'samplin'; is it 'sampling'?"),
        ('{"question": "a", "tools": []}', "stand beside 'messages', not 'question'"),
    ],
)
def test_keys_that_nothing_would_read(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=message):
        read_prompts(path)
