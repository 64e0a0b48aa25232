"""What cannot be served is refused, with one message, by the library and by the command line."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from flax import nnx

from jaxspec import cli
from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.requests import Request
from tests import make_checkpoint, tiny

TREE = TreeConfig(2, 1, 3)


class Case(NamedTuple):
    """Something refused.

    Attributes:
      message: part of what is said; the library's first, the command line's where it differs.
      config, request: fields that are wrong; the others are fine.
      flags: the same at the command line; None where it has no way to say it.
      prompts: that `--tokens` reads, where they are not fine.
    """

    message: tuple[str, ...]
    config: Mapping[str, Any] = MappingProxyType({})
    request: Mapping[str, Any] = MappingProxyType({})
    flags: tuple[str, ...] | None = ()
    prompts: Any = ((1, 2),)


CASES = {
    "empty prompt": Case(
        ("the prompt is empty", "entry 0: empty prompt"), request={"prompt_ids": ()}, prompts=[[]]
    ),
    "id out of the vocabulary": Case(
        ("token id 24 ", "token id 24,"), request={"prompt_ids": (1, 24)}, prompts=[[1, 24]]
    ),
    "negative id": Case(
        ("token id -1 ", "token id -1,"), request={"prompt_ids": (-1,)}, prompts=[[-1]]
    ),
    "tree without levels": Case(
        ("levels and branches start at 1",), {"tree": TreeConfig(0, 1, 2)}, {}, ("--tree", "0x1x2")
    ),
    "tree of the root alone": Case(
        ("nodes at 2",), {"tree": TreeConfig(1, 1, 1)}, {}, ("--tree", "1x1x1")
    ),
    "more nodes than candidates": Case(
        ("offer only 2",), {"tree": TreeConfig(2, 1, 4)}, {}, ("--tree", "2x1x4")
    ),
    "more branches than are kept": Case(
        ("best 32 candidates",), {"tree": TreeConfig(1, 33, 34)}, {}, ("--tree", "1x33x34")
    ),
    "more branches than draft tokens": Case(
        ("draft vocabulary of 20",), {"tree": TreeConfig(1, 21, 22)}, {}, ("--tree", "1x21x22")
    ),
    "a draft without a tree": Case(("a draft wants a tree",), {"tree": None}, {}, None),
    "temperature below 0": Case(
        ("temperature is -0.5",), {}, {"temperature": -0.5}, ("--temperature", "-0.5")
    ),
    "temperature that is no number": Case(
        ("temperature is nan",), {}, {"temperature": float("nan")}, ("--temperature", "nan")
    ),
    "top_p 0": Case(("top_p is 0.0",), {}, {"top_p": 0.0}, ("--top-p", "0")),
    "top_p above 1": Case(("top_p is 1.5",), {}, {"top_p": 1.5}, ("--top-p", "1.5")),
    "top_p that is no number": Case(
        ("top_p is nan",), {}, {"top_p": float("nan")}, ("--top-p", "nan")
    ),
    "min_p below 0": Case(("min_p is -0.1",), {}, {"min_p": -0.1}, ("--min-p", "-0.1")),
    "min_p above 1": Case(("min_p is 1.1",), {}, {"min_p": 1.1}, ("--min-p", "1.1")),
    "a stop id that is no token": Case(
        ("stop id 24 is not in a vocabulary of 24",), {}, {"stop_ids": (24,)}, ("--stop-id", "24")
    ),
    "too many stop ids": Case(
        ("17 stop ids, the target's end of sequence among them; at most 16",),
        {},
        {"stop_ids": tuple(range(17))},
        tuple(arg for i in range(17) for arg in ("--stop-id", str(i))),
    ),
    "top_k below 0": Case(("top_k is -1",), {}, {"top_k": -1}, ("--top-k", "-1")),
    "top_k beyond int32": Case(
        ("top_k is 2147483648",), {}, {"top_k": 2**31}, ("--top-k", "2147483648")
    ),
    "seed below 0": Case(
        ("seed is -1; it lies between 0 and 4294967295",), {}, {"seed": -1}, ("--seed", "-1")
    ),
    "seed beyond uint32": Case(
        ("seed is 4294967296",), {}, {"seed": 2**32}, ("--seed", "4294967296")
    ),
    "seed that counts up beyond uint32": Case(
        ("seed is 4294967296", "entry 1: seed is 4294967296"),
        request={"seed": 2**32},
        flags=("--seed", "4294967295"),
        prompts=[[1], [2]],
    ),
    "no new token": Case(
        ("max_new_tokens is 0",), {"max_new_tokens": 0}, {}, ("--max-new-tokens", "0")
    ),
    "no new token of one request": Case(
        ("max_new_tokens is 0",), {}, {"max_new_tokens": 0}, flags=None
    ),
    "no place": Case(("batch_size is 0",), {"batch_size": 0}, {}, ("--batch-size", "0")),
    "context of one token": Case(
        ("context_length is 1;",), {"context_length": 1}, {}, ("--context-length", "1")
    ),
    "context beyond the target's": Case(
        ("context_length is 4096;",), {"context_length": 4096}, {}, ("--context-length", "4096")
    ),
    "an implementation that cannot run here": Case(
        ("implementation mosaic of mla_attention: the default backend is cpu",),
        flags=("--implementation", "mosaic"),
    ),
}


@pytest.fixture(scope="module")
def generator(target, draft) -> Generator:
    """One that serves; its context is as short as the one in the table."""
    return Generator(target, draft, GenerateConfig(TREE, context_length=8, prefill_chunk=4))


@pytest.mark.parametrize("name", CASES)
def test_the_library_refuses(name, target, draft, generator):
    case = CASES[name]
    if case.request:
        request = Request(**{"prompt_ids": (1, 2), **case.request})
        with pytest.raises(InputError) as refused:
            generator.run([Request((1,)), request])
        assert str(refused.value).startswith("request 1: ")
    else:
        if "mosaic" in case.message[0]:
            numerics = dataclasses.replace(tiny.NUMERICS, implementation="mosaic")
            target = nnx.clone(target)
            target.numerics = numerics
        with pytest.raises(InputError) as refused:
            Generator(target, draft, GenerateConfig(**{"tree": TREE, **case.config}))
    assert case.message[0] in str(refused.value)


def test_an_end_of_sequence_that_is_asked_for_and_ignored(target, draft):
    target = nnx.clone(target)
    target.config = dataclasses.replace(target.config, eos_token_ids=(7,))
    config = GenerateConfig(TREE, context_length=8, prefill_chunk=4, ignore_eos=True)
    with pytest.raises(InputError, match="request 0: stop id 7 is the target's end of sequence"):
        Generator(target, draft, config).run([Request((1,), stop_ids=(3, 7))])


def test_a_prompt_beyond_capacity_fails_alone(generator):
    """In the library; in a context of 8 a prompt of 7 has room for one token."""
    requests = [Request((1,)), Request((1,) * 8), Request((1,) * 7), Request((1,) * 90)]
    done = generator.run(requests).completions
    assert [completion.finish for completion in done] == ["capacity"] * 4
    assert [len(completion.tokens) for completion in done] == [7, 0, 1, 0]
    assert [completion.error is None for completion in done] == [True, False, True, False]
    assert done[1].error is not None
    assert done[1].error.startswith(
        "a prompt of 8 tokens leaves no room for a new one in a context"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with `target` and `draft`, the tiny pair."""
    place = tmp_path_factory.mktemp("bad")
    config = make_checkpoint.target_config("flat")
    make_checkpoint.write(place / "target", config, make_checkpoint.target_tensors(config))
    make_checkpoint.write(place / "draft", *make_checkpoint.draft_layout("specforge"))
    return place


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.flags is not None])
def test_the_command_line_refuses(name, place, monkeypatch, capsys):
    case = CASES[name]
    (place / "ids.json").write_text(json.dumps(case.prompts))
    argv = ["jaxspec", "generate", "--tokens", "ids.json", "--target", "target"]
    argv += ["--draft", "draft", "--compile-cache", "none", "--json"]
    if "--tree" not in (case.flags or ()):
        argv += ["--tree", str(TREE)]
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [*argv, *(case.flags or ())])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, "")
    assert err.startswith("jaxspec: ")
    assert err.count("\n") == 1
    assert case.message[-1] in err
