import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.config import TreeConfig
from jaxspec.report import GenerateReport, PromptReport
from jaxspec.requests import Completion

PROMPT_KEYS = {
    "prompt_len", "tokens", "text", "finish", "num_steps", "accept_length", "accept_rate",
    "accept_per_depth",
}  # fmt: skip
KEYS = {
    "prompts", "accept_length", "accept_ceiling", "accept_rate", "tokens_per_s", "prefill_ms",
    "decode_ms", "compile_s", "tree", "target", "draft", "device", "dtype", "implementation",
    "jax_version", "accept_length_sglang", "accept_rate_sglang_legacy",
}  # fmt: skip

CHAIN = TreeConfig(3, 1, 4)


def prompt_report(accepted, last=None, levels=3, **fields) -> PromptReport:
    """A prompt whose steps accepted so many; the last one emitted `last` tokens, or all."""
    tokens = 1 + sum(count + 1 for count in accepted)
    if last is not None:
        tokens -= accepted[-1] + 1 - last
        accepted = [*accepted[:-1], min(accepted[-1], last)]
    done = Completion(tuple(range(tokens)), "length", tuple(accepted), 10.0, 20.0)
    return PromptReport("p", None, (1, 2), done, fields.get("text"), levels)


def generate_report(prompts, tree=CHAIN, **fields) -> GenerateReport:
    defaults = dict(
        target="t@1", draft="d@2", capture=None, draft_claim=None, draft_rotary=None,
        device="cpu", dtype="float32", mesh=None, implementations={"mla_attention": "xla"},
        jax_version="0", prefill_ms=1.0, decode_ms=500.0, compile_s=2.0, accept_ceiling=None,
        num_decoded=30, machine="m",
        command="c",
    )  # fmt: skip
    return GenerateReport(tuple(prompts), tree, **{**defaults, **fields})


def test_keys_are_the_contract():
    out = json.loads(json.dumps(generate_report([prompt_report([3, 0])]).to_dict()))
    assert out.keys() >= KEYS
    assert out["prompts"][0].keys() >= PROMPT_KEYS
    assert out["accept_ceiling"] is None
    assert out["tree"] == "3x1x4"
    assert out["kind"] == "measured"


def test_figures_by_hand():
    # Steps accept 3, 0 and 1 of 3 drafted tokens and emit 4, 1 and 2: 7 tokens, and 1 of prefill.
    out = generate_report([prompt_report([3, 0, 1], text="abc")]).to_dict()
    prompt = out["prompts"][0]
    assert (prompt["prompt_len"], prompt["num_steps"], len(prompt["tokens"])) == (2, 3, 8)
    assert prompt["text"] == "abc"
    for figures in (out, prompt):
        assert figures["accept_length"] == pytest.approx(7 / 3)
        assert figures["accept_rate"] == pytest.approx(4 / 9)
        assert figures["accept_per_depth"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert out["accept_length_sglang"] == pytest.approx(8 / 3)
    assert out["accept_rate_sglang_legacy"] == pytest.approx((4 + 3) / (9 + 3))
    assert out["tokens_per_s"] == pytest.approx(30 / 0.5)


def test_run_figures_are_over_all_steps_not_over_prompts():
    out = generate_report([prompt_report([3]), prompt_report([0, 0, 0])]).to_dict()
    assert out["accept_length"] == pytest.approx(7 / 4)
    assert [prompt["accept_length"] for prompt in out["prompts"]] == [4, 1]


def test_a_step_that_was_cut_counts_what_it_emitted():
    # Of 3 accepted tokens and a bonus, the second was the end of the sequence.
    out = prompt_report([3], last=2).to_dict()
    assert (out["accept_length"], out["accept_rate"]) == (2, pytest.approx(2 / 3))
    assert out["accept_per_depth"] == [1, 1, 0]


def test_sglang_legacy_counts_the_nodes_of_a_tree():
    out = generate_report([prompt_report([3, 0])], tree=TreeConfig(3, 4, 16)).to_dict()
    assert out["accept_rate_sglang_legacy"] == pytest.approx((3 + 2) / (2 * 16))


def test_no_steps_and_no_draft():
    out = generate_report([prompt_report([])]).to_dict()
    assert out["accept_length"] is None
    assert out["accept_per_depth"] == [None, None, None]
    plain = generate_report([prompt_report([0, 0], levels=0)], tree=None, draft=None).to_dict()
    assert (plain["tree"], plain["draft"], plain["accept_length"]) == (None, None, 1)
    assert (plain["accept_rate"], plain["accept_per_depth"]) == (None, [])
    assert plain["accept_rate_sglang_legacy"] is None
    assert generate_report([], num_decoded=0, decode_ms=0.0).tokens_per_s is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4))
def test_figures_agree_with_each_other(accepted):
    out = generate_report([prompt_report(steps) for steps in accepted]).to_dict()
    assert out["accept_length"] == pytest.approx(1 + sum(out["accept_per_depth"]))
    assert out["accept_rate"] == pytest.approx(sum(out["accept_per_depth"]) / 3)
    assert out["accept_rate_sglang_legacy"] == pytest.approx(out["accept_length"] / 4)
