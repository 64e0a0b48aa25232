"""The arithmetic of a step: distinct experts, and bytes against numbers from elsewhere."""

import itertools
import math

import numpy as np
import pytest

from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.kernels.expert_matmul import cases as expert_cases
from jaxspec.kernels.mla_attention import cases as mla_cases
from jaxspec.traffic import StepShape, distinct_experts, most_experts, work_of_step
from tests.full_size import abstract_draft, abstract_latent_draft, abstract_target

FULL = 32768
TREE = TreeConfig(3, 4, 16)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 3, 6])
def test_every_choice_of_six_experts(tokens, devices):
    """All 15 pairs of 6 experts for each token, one by one."""
    held = 6 // devices
    counts, most = [], []
    for chosen in itertools.product(itertools.combinations(range(6), 2), repeat=tokens):
        of_device = [0] * devices
        for expert in set(itertools.chain(*chosen)):
            of_device[expert // held] += 1
        counts.append(sum(of_device))
        most.append(max(of_device))
    assert distinct_experts(tokens, 6, 2) == pytest.approx(np.mean(counts))
    assert most_experts(tokens, 6, 2, devices) == pytest.approx(np.mean(most))


@pytest.mark.parametrize("tokens", [1, 4, 16, 128])
def test_experts_of_kimi_drawn_at_random(tokens):
    """384 experts on 8 devices, 8 for a token: within four standard errors of 400 draws."""
    rng = np.random.default_rng(tokens)
    most = []
    for _ in range(400):
        is_chosen = np.zeros(384, bool)
        for _ in range(tokens):
            is_chosen[rng.permutation(384)[:8]] = True
        most.append(is_chosen.reshape(8, 48).sum(1).max())
    error = np.std(most) / math.sqrt(len(most))
    assert abs(most_experts(tokens, 384, 8, 8) - np.mean(most)) < 4 * error


def test_experts_of_all_tokens():
    """kernels.md's 8, 31, 60 and 110 of 384; and never more than there are."""
    found = [round(distinct_experts(tokens, 384, 8)) for tokens in (1, 4, 8, 16)]
    assert found == [8, 31, 60, 110]
    assert most_experts(2000, 384, 8, 8) == pytest.approx(48)


def full_size(mesh: MeshConfig):
    numerics = Numerics(mesh=mesh)
    return abstract_target(61, numerics), abstract_draft(32000, numerics=numerics)


@pytest.mark.parametrize("cache", ["replicated", "slots"])
def test_attention_reads_the_cache_once(cache):
    target, draft = full_size(MeshConfig(1, 8, cache))
    work = work_of_step(target, draft, StepShape(TREE, 4, FULL))["attention cache"]
    devices = 8 if cache == "slots" else 1
    assert work.num_bytes == 61 * 4 * FULL * (512 + 64) * 2 / devices
    # As the kernel's own cases count it: 8 heads over all slots, or 64 over an eighth. They also
    # count the 16 new rows and the queries.
    case = mla_cases.Case("here", 16, 8, (FULL,) * 4, FULL, has_tree=True)
    assert work.num_flops == pytest.approx(61 * case.num_flops, rel=1e-3)


def test_experts_are_read_as_the_kernels_cases_read_them():
    """A case with 48 experts of which all are chosen; the rest of its bytes are activations."""
    target, draft = full_size(MeshConfig(1, 8))
    work = work_of_step(target, draft, StepShape(TREE, 128, FULL))["routed experts"]
    case = expert_cases.Case("here", 2048, 48)
    every = np.arange(48).reshape(6, 8)
    of_layer = case.num_bytes(every) - 2048 * 7168 * (2 + 4)
    assert work.num_bytes == pytest.approx(60 * of_layer)
    # An eighth of all choices is a device's.
    assert work.num_flops == 60 * 2048 * 8 / 8 * 3 * 2 * 7168 * 2048


def test_a_token_reads_a_device_less_than_its_share_of_all_tokens():
    target, _ = full_size(MeshConfig(1, 8))
    one = work_of_step(target, None, StepShape(None, 1, FULL))
    assert set(one) == {"attention cache", "routed experts", "dense layers", "head"}
    # From one, all 8 on a device, to one each.
    of_expert = 24_772_608
    assert 60 * of_expert < one["routed experts"].num_bytes < 60 * 8 * of_expert


def test_dense_layers_by_hand():
    """Every matrix of a layer, an eighth of those that are cut by heads or inner width."""
    target, draft = full_size(MeshConfig(1, 8))
    replicated = 7168 * 1536 + 7168 * 576
    cut = 1536 * 64 * 192 + 64 * 512 * (128 + 128) + 64 * 128 * 7168
    norms = 2 * 7168 + 1536 + 512
    attention = 2 * (replicated + cut // 8 + norms)
    dense = 2 * 3 * 7168 * 18432 // 8
    sparse = 2 * 3 * 7168 * 2048 // 8 + 4 * (7168 * 384 + 384)
    work = work_of_step(target, draft, StepShape(TREE, 1, FULL))
    assert work["dense layers"].num_bytes == 61 * attention + dense + 60 * sparse
    logits = 16 * 163840 * 4
    assert work["head"].num_bytes == 2 * 7168 * 163840 // 8 + 2 * logits


def test_draft_by_hand():
    target, draft = full_size(MeshConfig(1, 8))
    layer = 2 * (4 * 8192 * 7168 + 3 * 8192 * 7168) // 8  # queries, keys, values of 2 x 7168; out
    layer += 2 * 3 * 7168 * 18432 // 8
    head, fc = 2 * 7168 * 32000 // 8, 2 * 21504 * 7168
    cache = 2 * 2 * FULL * 8 * 128
    found = work_of_step(target, draft, StepShape(TREE, 1, FULL))["draft"]
    assert found.num_bytes == 3 * (layer + head + cache) + fc


@pytest.mark.parametrize(("cache", "devices"), [("replicated", 1), ("slots", 8)])
def test_latent_draft_reads_latents(cache, devices):
    """What a thousand more tokens cost: 512 + 64 numbers of each, and with slots an eighth."""
    mesh = MeshConfig(1, 8, cache)
    target = abstract_target(numerics=Numerics(mesh=mesh))
    draft, tree = abstract_latent_draft(Numerics(mesh=mesh)), TreeConfig(3, 4, 16)
    shorter, longer = (
        work_of_step(target, draft, StepShape(tree, 2, length))["draft"] for length in (1000, 2000)
    )
    assert longer.num_bytes - shorter.num_bytes == 3 * 2 * 1000 * 576 * 2 / devices
    passed = 2 * (2 * 4 + 4)
    assert longer.num_flops - shorter.num_flops == 2 * passed * 8 * 1000 * (576 + 512)


def test_groups_share_the_batch():
    """Two groups of four devices with twice the batch: a device sees one group's work."""
    target, draft = full_size(MeshConfig(2, 4))
    alone, draft_alone = full_size(MeshConfig(1, 4))
    shared = work_of_step(target, draft, StepShape(TREE, 8, FULL))
    assert shared == work_of_step(alone, draft_alone, StepShape(TREE, 4, FULL))
