import json
import re

import pytest

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
        ({"prompt": "a", "messages": []}, {"text": "a"}),
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
        EncodedPrompt("0", (1, 2), None, f"{path}, entry 0"),
        EncodedPrompt("1", (3,), None, f"{path}, entry 1"),
    ]


def test_prompts_that_the_target_cannot_take():
    prompts = [EncodedPrompt("0", (1, 2)), EncodedPrompt("1", (3, -1), where="t.json, entry 1")]
    check_prompts(prompts[:1], vocab_size=3, context_length=3)
    with pytest.raises(InputError, match=r"t\.json, entry 1: token id -1, .* ids 0 to 8"):
        check_prompts(prompts, vocab_size=9, context_length=9)
    with pytest.raises(InputError, match=r"the prompt: token id 2, .* ids 0 to 1"):
        check_prompts(prompts, vocab_size=2, context_length=9)
    with pytest.raises(InputError, match=r"the prompt: 2 tokens .* context of 2; raise --context"):
        check_prompts(prompts, vocab_size=9, context_length=2)


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


def test_text_that_cannot_be_encoded():
    with pytest.raises(InputError, match=r"the prompt: the target's directory has no tiktoken"):
        encode_prompts([Prompt("0", text="a")], None)
    with pytest.raises(InputError, match="the prompt: empty prompt"):
        encode_prompts([Prompt("0", text=" ")], None)
