"""The generator at its edges: capacity, limits, refilled places, ends of sequence, NaNs."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator
from jaxspec.hlo import loop_writes
from jaxspec.prompts import EncodedPrompt, Prompt
from jaxspec.requests import Completion, Request
from jaxspec.text import SamplingConfig, TextRun, stream
from jaxspec.tokenizer import load_tokenizer
from tests.tiny_tokenizer import write_tokenizer

SLOTS, CHUNK, PLACES = 40, 8, 4
TREE = TreeConfig(3, 2, 6)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, 24, length).tolist())


def make(target, draft, stop=(), tree=TREE):
    target = nnx.clone(target)
    target.config = dataclasses.replace(target.config, eos_token_ids=tuple(stop))
    config = GenerateConfig(
        tree=tree, context_length=SLOTS, batch_size=PLACES, prefill_chunk=CHUNK, steps_per_call=3
    )
    return Generator(target, draft if tree else None, config)


@pytest.fixture(scope="module")
def free(target, draft):
    """Nothing ends a sequence of its own accord."""
    return make(target, draft)


SETTINGS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 9},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
]


def mixed(count: int) -> list[Request]:
    """Ragged prompts and limits, every setting, seeds."""
    return [
        Request(prompt(1 + 5 * i % 33), seed=i, max_new_tokens=3 + 7 * i % 29, **SETTINGS[i % 6])
        for i in range(count)
    ]


def tokens_of(generator, *requests):
    return [c.tokens for c in generator.run(list(requests)).completions]


def test_capacity_and_limits(free):
    wanted = tokens_of(free, Request(prompt(5), max_new_tokens=35))[0]
    run = free.run(
        [
            Request(prompt(SLOTS - 1), max_new_tokens=9),
            Request(prompt(5), max_new_tokens=1),
            Request(prompt(5), max_new_tokens=500),
            Request(prompt(5), max_new_tokens=35),
            Request(prompt(5), max_new_tokens=2),
            Request(prompt(SLOTS - 2), max_new_tokens=9),
        ]
    )
    done = run.completions
    assert [c.finish for c in done] == [
        "capacity",
        "length",
        "capacity",
        "length",
        "length",
        "capacity",
    ]
    assert [len(c.tokens) for c in done] == [1, 1, 35, 35, 2, 2]
    assert done[0].accepted == done[1].accepted == ()
    for c in done[1:5]:
        assert c.tokens == wanted[: len(c.tokens)]
    for c in done:
        assert sum(c.accepted) + len(c.accepted) >= len(c.tokens) - 1


def same(got: Completion, wanted: Completion) -> None:
    assert (got.tokens, got.accepted, got.finish) == (wanted.tokens, wanted.accepted, wanted.finish)


def test_a_step_copies_no_cache(free):
    """Neither the target's nor the draft's: each is written in place, when all have read it."""
    assert free.decode_hlo.count(f",{SLOTS},") > 10
    writes = [write for write in loop_writes(free.decode_hlo) if write.opcode == "copy"]
    assert not [write for write in writes if write.shape[-2:-1] == (SLOTS,)]


def test_alone_and_together_in_three_orders(free):
    """32 ragged requests over four places: tokens and accepted counts are the same, bit for bit."""
    requests = mixed(32)
    alone = [free.run([request]).completions[0] for request in requests]
    for order in (range(32), range(31, -1, -1), np.random.default_rng(0).permutation(32)):
        together = free.run([requests[i] for i in order]).completions
        for i, done in zip(order, together, strict=True):
            same(done, alone[i])


def test_nothing_is_traced_or_compiled_for_fifty_mixed_requests(free):
    """Whatever a request asks for is data. A first run has compiled what stands around."""
    free.run(mixed(5))
    heard = []

    def listen(event: str, duration: float, **_) -> None:
        heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1)(np.float32(1))
    assert any("compile" in event for event in heard), "the listener hears"
    heard.clear()
    requests = [dataclasses.replace(r, stop_ids=(i % 24, 3)) for i, r in enumerate(mixed(50))]
    done = free.run(requests).completions
    assert {c.finish for c in done} == {"stop", "length", "capacity"}
    assert heard == []
    assert free.num_traces == {"prefill": 1, "decode": 1}


def kind_of(index: int, done: Completion) -> str:
    """Where in its step the token at `index` was emitted."""
    start = 1
    for count in done.accepted:
        if start <= index <= start + count:
            if index == start + count:
                return "bonus"
            if count > 1 and index == start:
                return "first accepted"
            return "last accepted" if count > 1 and index == start + count - 1 else "accepted"
        start += count + 1
    return "prefill"


KINDS = {"prefill", "first accepted", "accepted", "last accepted", "bonus"}


def cut(done: Completion, length: int) -> Completion:
    """What is left of a completion that is stopped after so many tokens."""
    accepted, left = [], length - 1
    for count in done.accepted:
        if left > 0:
            accepted.append(min(count, left))
            left -= count + 1
    tokens = done.tokens[:length]
    return dataclasses.replace(done, tokens=tokens, accepted=tuple(accepted), finish="stop")


@pytest.fixture(scope="module")
def whole(free) -> tuple[list[Request], list[Completion]]:
    """Requests with nothing that ends them: to the limit, or to the end of the context."""
    requests = [
        Request(prompt(5), 1.0 + 0.3 * (i % 3), seed=i, max_new_tokens=29 if i % 2 else 99)
        for i in range(24)
    ]
    return requests, list(free.run(requests).completions)


def places(done: Completion, seen: set[str], is_first) -> Iterator[int]:
    """Places to stop at: those of a kind that was not seen yet, some of the others."""
    for i in filter(is_first, range(len(done.tokens))):
        is_end = i == len(done.tokens) - 1
        kind = f"end by {done.finish}" if is_end else kind_of(i, done)
        if kind not in seen or i % 5 == 0:
            seen.add(kind)
            yield i


def test_a_stop_id_at_every_place(free, whole):
    """In every place of a step; as the last token that the limit, or the context, allows."""
    asked, wanted, kinds = [], [], set()
    for request, done in zip(*whole, strict=True):
        tokens = done.tokens
        for i in places(done, kinds, lambda i, tokens=tokens: tokens.index(tokens[i]) == i):
            asked.append(dataclasses.replace(request, stop_ids=(tokens[i],)))
            # The same with a limit that ends there as well.
            asked.append(dataclasses.replace(asked[-1], max_new_tokens=i + 1))
            wanted += [cut(done, i + 1)] * 2
    assert kinds == KINDS | {"end by length", "end by capacity"}
    for got, want in zip(free.run(asked).completions, wanted, strict=True):
        same(got, want)


def test_the_end_of_sequence_at_every_place(target, draft, whole):
    requests, free_run = whole

    def kinds_of(token: int) -> set[str]:
        found = (done for done in free_run if token in done.tokens)
        return {kind_of(done.tokens.index(token), done) for done in found}

    eos = max(range(24), key=lambda token: len(kinds_of(token)))
    assert len(kinds_of(eos)) >= len(KINDS) - 1
    ended = make(target, draft, (eos,)).run(requests).completions
    for got, done in zip(ended, free_run, strict=True):
        if eos not in done.tokens:
            same(got, done)
            continue
        same(got, dataclasses.replace(cut(done, done.tokens.index(eos) + 1), finish="eos"))


def test_a_stop_string_at_every_place(free, whole, tmp_path):
    """A prompt's own, of two characters, that ends there; token i is character i here."""
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    prompts, wanted, kinds = [], [], set()
    for request, done in zip(*whole, strict=True):
        text = "".join(map(chr, done.tokens))
        for i in places(done, kinds, lambda i, t=text: i and t.find(t[i - 1 : i + 1]) == i - 1):
            settings = {"temperature": request.temperature, "seed": request.seed}
            settings |= {"stop": (text[i - 1 : i + 1],), "max_new_tokens": request.max_new_tokens}
            prompts.append(EncodedPrompt(str(len(prompts)), request.prompt_ids, None, settings))
            wanted.append((cut(done, i + 1), text[: i - 1]))
    assert kinds == (KINDS - {"prefill"}) | {"end by length", "end by capacity"}
    reports = TextRun(free, prompts, tokenizer, SamplingConfig()).finish()
    for report, (want, text) in zip(reports, wanted, strict=True):
        same(report.completion, want)
        assert report.text == text
        figures, steps = report.to_dict(), len(want.accepted)
        assert figures["accept_length"] == (len(want.tokens) - 1) / steps
        assert figures["accept_rate"] == sum(want.accepted) / (TREE.levels * steps)


def test_pieces_come_while_others_go_on(free):
    """Requests are asked for as places come free; the pieces of one are its tokens."""
    taken, requests = [], mixed(12)

    def one_by_one():
        for i, request in enumerate(requests):
            taken.append(i)
            yield request

    tokens, ended = {i: () for i in range(12)}, {}
    for piece in free.stream(one_by_one()):
        assert len(taken) - len(ended) <= PLACES, "no more are taken than there is room for"
        tokens[piece.index] += piece.tokens
        if piece.completion:
            ended[piece.index] = piece.completion
        else:
            assert piece.tokens
    assert list(ended) != sorted(ended), "short ones end first"
    for i, done in enumerate(free.run(requests).completions):
        assert tokens[i] == ended[i].tokens == done.tokens


def test_prompts_of_every_kind_stream(free):
    """Ids, and a prompt with an id, a limit and a stop id of its own."""
    wanted = tokens_of(free, Request(prompt(5), max_new_tokens=9))[0]
    own = {"max_new_tokens": 9, "stop_ids": (wanted[4],)}
    run = stream(free, [prompt(3), Prompt("mine", ids=prompt(5), settings=own)])
    tokens = {0: (), 1: ()}
    for piece in run:
        assert piece.text is None
        tokens[piece.index] += piece.tokens
    plain, mine = run.finish()
    assert (plain.id, mine.id, mine.settings) == ("0", "mine", own)
    assert tokens == {0: plain.completion.tokens, 1: mine.completion.tokens}
    assert mine.completion.tokens == wanted[: wanted.index(wanted[4]) + 1]
    assert len(run.run.completions) == 2


def test_a_run_that_is_left_and_one_that_is_overtaken(free):
    wanted = tokens_of(free, *mixed(3))
    left = free.stream(mixed(6))
    next(left)
    assert tokens_of(free, *mixed(3)) == wanted
    with pytest.raises(RuntimeError, match="another run of this generator began"):
        list(left)


def test_a_bad_request_among_those_that_come(free):
    """A list is looked through before it begins; of others, each when it is its turn."""
    requests = [Request(prompt(5), max_new_tokens=2), Request((1,), top_p=2.0)]
    for run in (free.run, lambda requests: list(free.stream(iter(requests)))):
        with pytest.raises(InputError, match="request 1: top_p is"):
            run(requests)


def test_a_nan_leaves_the_generator_usable(free, target, draft):
    """After a NaN in one request the next run starts clean: no place of the failed one runs on."""
    bad = nnx.clone(target)
    bad.embed[...] = bad.embed[...].at[23].set(jnp.nan)
    generator = make(bad, draft)
    finished = []
    pieces = generator.stream(
        [Request((1, 2, 3), max_new_tokens=1), Request((4, 23), max_new_tokens=5)]
    )
    with pytest.raises(FloatingPointError, match="request 1: the target"):
        finished.extend(piece.index for piece in pieces)
    assert finished == [0], "what ended in the same call is handed over first"
    (fine,) = generator.run([Request((1, 2, 3), max_new_tokens=4)]).completions
    (whole,) = free.run([Request((1, 2, 3), max_new_tokens=4)]).completions
    assert 23 not in whole.tokens and fine.tokens == whole.tokens


def test_a_draft_that_is_nan_is_not_silent(target, draft):
    """Lossless, and nobody is told: acceptance is just low."""
    bad = nnx.clone(draft)
    bad.fc[...] = bad.fc[...] * jnp.nan
    generator = make(target, bad)
    with pytest.raises(FloatingPointError, match="draft"):
        generator.run([Request(prompt(5), max_new_tokens=20)])


def test_one_call_at_a_time(free):
    """For who measures. What ends within the steps is no step of the whole batch any more."""
    requests = [Request(prompt(3), max_new_tokens=20)] * PLACES
    assert free.admit(requests) > 0 and free.decode() > 0
    free.admit([*requests[1:], Request(prompt(3), max_new_tokens=2)])
    with pytest.raises(RuntimeError, match="came to its end"):
        free.decode()
