"""A mesh of devices gives what one device gives; where every array lies, and who talks when.

Whole runs are on eight CPU devices, in a process of their own: `on_eight_devices.py`.
"""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import cli, processes
from jaxspec.cache import Latents, Stripe, commit
from jaxspec.checkpoint import _Share, _Slab
from jaxspec.collectives import held_experts
from jaxspec.config import MeshConfig, Numerics
from jaxspec.convert.plan import Part, Piece
from jaxspec.errors import InputError
from jaxspec.sharding import (
    Devices,
    check_batch,
    check_draft,
    check_target,
    devices_of,
    spec_of,
    specs_of,
)
from tests import full_size, make_checkpoint, tiny
from tests import on_eight_devices as program
from tests.reference.target import ReferenceTarget
from tests.speculation import NEAR_TIE
from tests.speculation import Request as OracleRequest
from tests.together import Ended, free_address, run_together

ROOT = Path(__file__).parent.parent
RUNS = (("1x8", "replicated"), ("2x4", "slots"))
MORE = (
    ("1x8", "slots"),
    ("2x4", "replicated"),
    ("4x2", "replicated"),
    ("4x2", "slots"),
    ("8x1", "replicated"),
    ("8x1", "slots"),
)
EACH = [
    *(pytest.param(run, id=" ".join(run)) for run in RUNS),
    *(pytest.param(run, id=" ".join(run), marks=pytest.mark.slow) for run in MORE),
]


@functools.cache
def told(asked: tuple[Any, ...]) -> dict[str, Any]:
    """What the program says of these runs."""
    command = [sys.executable, "-m", "tests.on_eight_devices", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def of(run: tuple[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one device gives, and what the mesh does."""
    found = told(("loading", *RUNS) if run in RUNS else ("ceiling", *MORE))
    return found["alone"], found[" ".join(run)]


@pytest.mark.parametrize("run", EACH)
def test_tokens_are_those_of_one_device(run):
    """Greedy and sampled ones, and what each step accepted; but for near-ties, which are shown."""
    alone, mesh = of(run)
    assert len({len(tokens) for tokens in alone["tokens"]}) == 1
    assert sum(map(sum, alone["accepted"])) > 10, "drafts are accepted, so extends are of paths"
    for index, (want, got) in enumerate(zip(alone["tokens"], mesh["tokens"], strict=True)):
        if want == got:
            continue
        at = next(i for i, pair in enumerate(zip(want, got, strict=True)) if len(set(pair)) > 1)
        margin = margin_of(program.requests()[index], want[:at], program.TARGET)
        print(f"{run}, request {index}: tokens part at {at}, where the margin is {margin}")
        assert margin < NEAR_TIE
    assert mesh["tokens"] != alone["tokens"] or mesh["accepted"] == alone["accepted"]


def margin_of(request: Any, tokens: list[int], config: dict[str, Any]) -> float:
    """By how much a target in numpy decides on the token that follows."""
    asked = OracleRequest(
        request.prompt_ids,
        request.temperature,
        request.top_k,
        request.top_p,
        request.min_p,
        request.seed,
    )
    target = ReferenceTarget(tiny.target_tensors(config), config)
    prompt = [*request.prompt_ids, *tokens]
    seen, choose = target.run(prompt), asked.choose(config["vocab_size"])
    return min(choose(seen.logits[-1], len(prompt)).margin, seen.margins.min())


@pytest.mark.parametrize("run", EACH)
def test_features_are_those_of_one_device(run):
    """Every boundary, the features, the experts and the draft's logits, of a recorded text."""
    differences = of(run)[1]["differences"]
    assert {"features", "draft.logits", "boundary.004", "router.003"} <= differences.keys()
    for name, difference in differences.items():
        # Logits are sums of 64 products each several units large.
        limit = 5e-5 if "logits" in name else 1e-5
        limit = 0 if name.startswith("router.") else limit
        assert difference <= limit, (name, difference)


@pytest.mark.parametrize("run", EACH)
def test_devices_do_not_come_to_differ(run):
    """What devices of a group both hold, state and caches, is the same bits after a run."""
    assert of(run)[1]["differing_copies"] == []


@pytest.mark.parametrize("run", EACH)
def test_collectives_of_a_step(run):
    """By loop of the decode program: the step's body, the sparse layers', the draft's levels'."""
    alone, mesh = of(run)
    assert alone["collectives"] == {}
    found = sorted(sorted(opcodes) for opcodes in mesh["collectives"].values())
    if MeshConfig.parse(run[0]).model == 1:
        assert found == []
        return
    two_sums, draft_pass = ["all-reduce"] * 2, ["all-gather"] + ["all-reduce"] * 3
    exchange = ["all-gather", "all-to-all"] if run[1] == "slots" else []
    layer = sorted(exchange + two_sums)
    # Around the layers: embedding and head of the target. Its one dense layer is no loop.
    step = sorted(["all-reduce", "all-gather", *layer, *draft_pass])
    assert found == sorted([step, layer, draft_pass])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_draft_with_latent_attention(run):
    """Its latents lie as the target's do: on each device, or dealt out by slots."""
    found = told(("latent", *RUNS))
    alone, mesh = found["alone"], found[" ".join(run)]
    assert mesh["tokens"] == alone["tokens"]
    assert mesh["accepted"] == alone["accepted"]
    assert mesh["differing_copies"] == []
    assert max(mesh["differences"].values()) <= 5e-5
    assert mesh["bytes_per_device"] < 0.5 * alone["bytes_per_device"]


def test_loading_fills_each_device_with_its_part():
    loading = told(("loading", *RUNS))["loading"]
    for form in ("hf", "converted"):
        assert loading[form]["is_alike"]
        assert loading[form]["is_where_the_table_says"]
        assert loading[form]["bytes_per_device"] < 0.3 * loading["alone"]


@pytest.mark.slow
def test_a_ceiling_is_that_of_one_device():
    ceiling = told(("ceiling", *MORE))["ceiling"]
    for want, got in zip(ceiling["alone"], ceiling["mesh"], strict=True):
        assert got["accepted"] == want["accepted"]
        assert sum(want["accepted"]) > 0
        np.testing.assert_allclose(got["best"], want["best"], rtol=1e-4)
        np.testing.assert_allclose(got["draft"], want["draft"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_a_walk_is_that_of_one_device():
    walks = told(("ceiling", *MORE))["walks"]
    assert walks["mesh"]["accepted"] == walks["alone"]["accepted"]
    assert sum(sum(of_text) for of_text in walks["alone"]["accepted"][0]) > 0
    np.testing.assert_allclose(walks["mesh"]["surprise"], walks["alone"]["surprise"], rtol=1e-4)


def test_full_size_is_cut_by_eight():
    """Kimi-K2.5 and a draft on 1x8: what is replicated adds at most 3 % to an eighth."""
    mesh = MeshConfig(1, 8)
    target = full_size.abstract_target()
    check_target(mesh, target.config)
    params = nnx.state(target)
    whole, mine = 0, 0
    for leaf, spec in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(specs_of(params, mesh), is_leaf=is_spec),
        strict=True,
    ):
        size = leaf.size * leaf.dtype.itemsize
        whole += size
        mine += size / (8 if "model" in spec else 1)
    assert 0 < mine / (whole / 8) - 1 < 0.03


def is_spec(tree: Any) -> bool:
    return isinstance(tree, jax.sharding.PartitionSpec)


def test_every_parameter_is_in_the_table():
    mesh = MeshConfig(2, 4)
    for quantised in (True, False):
        config = dict(tiny.TARGET_CONFIG)
        if not quantised:
            del config["quantization_config"]
        specs_of(nnx.state(tiny.target_module(tiny.target_tensors(config), config)), mesh)
    specs_of(nnx.state(full_size.abstract_draft(32000)), mesh)
    with pytest.raises(KeyError, match=r"sparse\.new_thing: sharding.AXES names no axes of it"):
        spec_of("sparse.new_thing", 2, mesh)


def test_slots_are_cut_only_where_it_is_asked_for():
    cut = spec_of("target_cache.latent", 4, MeshConfig(2, 4, "slots"))
    whole = spec_of("target_cache.latent", 4, MeshConfig(2, 4))
    assert tuple(cut) == (None, "data", "model", None)
    assert tuple(whole) == (None, "data", None, None)
    # Caches, and a draft's kernels of the same last name.
    assert tuple(spec_of("draft_cache.key", 5, MeshConfig(2, 4)))[1:3] == ("model", "data")
    assert tuple(spec_of("1.attention.key", 3, MeshConfig(2, 4))) == (None, "model", None)


def test_stripes_deal_out_the_slots():
    """Committed to stripes, rows lie where they would in the whole cache, dealt out."""
    batch, slots, tokens, num = 3, 12, 5, 4
    rng = np.random.default_rng(0)

    def latents(length: int) -> Latents:
        shapes = (2, batch, length, 6), (2, batch, length, 2)
        return Latents(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes))

    cache, rows = latents(slots), latents(tokens)
    place = (
        jnp.asarray(rng.integers(0, tokens, (batch, tokens))),
        jnp.asarray([0, 3, 9]),
        jnp.asarray([5, 4, 5]),  # the last sequence runs over the end
    )
    whole = commit(cache, rows, *place)
    for index in range(num):
        stripe = Stripe(jnp.asarray(index), num)
        dealt = jax.tree.map(lambda slots, i=index: slots[:, :, i::num], cache)
        got = commit(dealt, rows, *place, stripe)
        np.testing.assert_array_equal(got.latent, whole.latent[:, :, index::num])
        np.testing.assert_array_equal(got.rotary, whole.rotary[:, :, index::num])
        lengths = np.arange(slots + 1)
        filled = [len(range(index, length, num)) for length in lengths]
        np.testing.assert_array_equal(stripe.num_filled(jnp.asarray(lengths)), filled)


def test_experts_of_other_devices_are_none_here():
    chosen = jnp.asarray([[[0, 3, 4, 7, 8, 15, 16]]])  # 16: no expert, for padding

    def held(_: jax.Array) -> jax.Array:
        return held_experts(chosen, 16, MeshConfig(1, 4))

    got = jax.vmap(held, axis_name="model")(jnp.arange(4))[:, 0, 0]
    wanted = [[0, 3, 4, 4, 4, 4, 4], [4, 4, 0, 3, 4, 4, 4], [4, 4, 4, 4, 0, 4, 4]]
    np.testing.assert_array_equal(got, [*wanted, [4, 4, 4, 4, 4, 3, 4]])


def test_pieces_that_lie_across_devices():
    """Parts of five experts, onto devices of four: each takes what overlaps."""
    whole = np.arange(3 * 16 * 4, dtype=np.float32).reshape(3, 16, 4)
    want = {"stack": jax.ShapeDtypeStruct(whole.shape, whole.dtype)}
    ends = [(np.array([0, first, 0]), np.array([3, first + 4, 4])) for first in range(0, 16, 4)]
    shares = [_Share(want, {"stack": box}, jax.devices()[0]) for box in ends]
    for layer in range(3):
        for first in range(0, 16, 5):
            part = whole[layer, first : first + 5]
            piece = Piece("experts", layer, Part(0, first, len(part)), {"stack": part})
            for share in shares:
                slab = _Slab.of(piece, part, share.box["stack"], want["stack"])
                share.take({} if slab is None else {"stack": slab})
    got = np.concatenate([share.arrays["stack"] for share in shares], axis=1)
    np.testing.assert_array_equal(got, whole)


def test_devices_talk_in_one_file():
    """Collectives, and the question which device this is, stand in collectives.py alone."""
    words = {"psum", "pmax", "pmin", "pmean", "all_gather", "all_to_all", "ppermute", "axis_index"}
    files = [*(ROOT / "jaxspec").glob("*.py")]
    talking = {
        path.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in words
    }
    assert talking == {"collectives.py"}


@pytest.mark.parametrize("text", ["8", "0x8", "1x8x2", "axb", "-1x8", ""])
def test_a_mesh_is_two_numbers(text):
    with pytest.raises(InputError, match=r"expected DATAxMODEL, as in 1x8"):
        MeshConfig.parse(text)


def test_a_mesh_that_does_not_fit_is_refused(target, draft):
    mesh = MeshConfig(1, 5)
    with pytest.raises(InputError) as refused:
        check_target(mesh, target.config)
    said = "mesh 1x5: its 5 devices (MODEL) do not divide the target's num_attention_heads 3, "
    assert str(refused.value).startswith(said + "n_routed_experts 8, vocab_size 24, ")
    with pytest.raises(InputError, match=r"do not divide the draft's .*num_key_value_heads 2"):
        check_draft(mesh, draft.config)
    with pytest.raises(InputError, match=r"its 4 groups .* do not divide a batch of 6"):
        check_batch(MeshConfig(4, 2), 6)
    with pytest.raises(InputError, match=r"mesh 1x2 takes 2 devices, and there are 1 \(cpu\)"):
        Devices.of(MeshConfig(1, 2))
    other = nnx.clone(draft)
    other.numerics = Numerics(dtype="float32", mesh=MeshConfig(1, 1))
    with pytest.raises(InputError, match="the target is on mesh None, and its draft on 1x1"):
        devices_of(target, other, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mesh", "8"), "mesh '8': expected DATAxMODEL"),
        (("--mesh", "1x7"), "its 7 devices (MODEL) do not divide the target's"),
        (("--mesh", "2x1"), "mesh 2x1 takes 2 devices, and there are 1"),
        (("--cache", "slots"), "--cache slots is of a mesh: give one with --mesh"),
    ],
)
def test_the_command_line_refuses(flags, said, monkeypatch, capsys):
    argv = ["jaxspec", "generate", "a prompt", "--compile-cache", "none", *flags]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert (exit.value.code, out) == (2, "")
    assert said in err
    assert err.startswith("jaxspec: ")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A directory with `target` and `draft` whose sizes eight devices divide, and `ids.json`."""
    place = tmp_path_factory.mktemp("mesh")
    target_tensors = make_checkpoint.target_tensors(program.TARGET)
    make_checkpoint.write(place / "target", program.TARGET, target_tensors)
    config, _ = make_checkpoint.draft_layout("specforge")
    draft_tensors = tiny.draft_tensors(program.DRAFT)
    make_checkpoint.write(place / "draft", config | program.DRAFT, draft_tensors)
    (place / "ids.json").write_text(json.dumps([[5, 9, 40], [1] * 9]))
    return place


def generate_together(place: Path, *each: tuple[str, ...], devices: int = 4) -> list[Ended]:
    """How `jaxspec generate` ended, started as often as flags are given, on so many CPU devices."""
    argv = ["generate", "--tokens", "ids.json", "--target", "target", "--draft", "draft", "--json"]
    argv += ["--batch-size", "2", "--max-new-tokens", "12", "--context-length", "64"]
    argv += ["--compile-cache", "none"]
    options = f"--xla_force_host_platform_device_count={devices} "
    options += "--xla_backend_optimization_level=0"
    return run_together(
        [[sys.executable, "-m", "jaxspec", *argv, *flags] for flags in each],
        place,
        {"XLA_FLAGS": options, "PYTHONPATH": str(ROOT)},
        timeout_s=300,
    )


def of_two(*flags: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The flags of two processes, which join on the loopback address."""
    shared = ("--coordinator", free_address(), "--num-processes", "2", "--process-index")
    return [(*mine, *shared, str(index)) for index, mine in enumerate(flags)]


@pytest.fixture(scope="module")
def tokens_alone(checkpoints) -> list[list[int]]:
    """Of one process with one device."""
    (alone,) = generate_together(checkpoints, (), devices=1)
    assert not alone.status, alone.err
    return [prompt["tokens"] for prompt in json.loads(alone.out.splitlines()[-1])["prompts"]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_two_processes(checkpoints, tokens_alone, mesh):
    """The same tokens as one process with one device; the first process alone speaks and writes."""
    flags = ("--mesh", mesh, "--cache", "slots", "--out", f"{mesh}.jsonl")
    first, second = generate_together(checkpoints, *of_two(flags, flags))
    assert first.status == second.status == 0, (first.err, second.err)
    # Gloo, by which CPUs of several processes talk, prints that it has connected.
    assert "{" not in second.out
    got = json.loads(first.out.splitlines()[-1])["prompts"]
    assert [prompt["tokens"] for prompt in got] == tokens_alone
    _, *entries = (checkpoints / f"{mesh}.jsonl").read_text().splitlines()
    assert sorted(json.loads(entry)["output_ids"] for entry in entries) == sorted(tokens_alone)


@pytest.mark.slow
def test_two_processes_go_on_with_a_run_file(checkpoints, tokens_alone):
    """Only the first has the file: the other hears from it which of the prompts is done."""
    path, flags = checkpoints / "resumed.jsonl", ("--mesh", "1x2", "--out", "resumed.jsonl")

    def run() -> list[dict[str, Any]]:
        first, second = generate_together(checkpoints, *of_two(flags, flags), devices=1)
        assert first.status == second.status == 0, (first.err, second.err)
        return json.loads(first.out.splitlines()[-1])["prompts"]

    whole = run()
    header, kept, lost = path.read_text().splitlines(keepends=True)
    path.write_text(header + kept + lost[:20])  # as a run leaves it that is killed while it writes
    prompts = run()
    lines = path.read_text().splitlines(keepends=True)
    assert lines[:2] == [header, kept]
    assert json.loads(lines[2])["output_ids"] == json.loads(lost)["output_ids"]
    assert [prompt["tokens"] for prompt in prompts] == tokens_alone
    again = [
        now["decode_ms"] != then["decode_ms"] for now, then in zip(prompts, whole, strict=True)
    ]
    ids = [prompt["id"] for prompt in prompts]
    assert [id for id, is_new in zip(ids, again, strict=True) if is_new] == [json.loads(lost)["id"]]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            ("--seed", "3", "--json"),
            ("--top-k", "5", "--join-timeout", "90"),
            "jaxspec: the processes of one run must be given the same, and were not:\n"
            "  --top-k: 0 in process 0; 5 in process 1\n"
            "  --seed: 3 in process 0; 0 in process 1\n",
        ),
        (
            ("--target", "target"),
            ("--target", "elsewhere/target"),
            "  --target: target in process 0; elsewhere/target in process 1\n",
        ),
    ],
)
def test_processes_that_disagree_are_refused(checkpoints, first, second, said):
    """Each of them says about what, and what each was given."""
    mesh = ("--mesh", "1x8")
    for ended in generate_together(checkpoints, *of_two((*mesh, *first), (*mesh, *second))):
        assert (ended.status, "{" in ended.out) == (2, False)
        assert said in ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-processes", "2"), "are given together or not at all"),
        (("--join-timeout", "2"), "--join-timeout without --coordinator"),
        (("--coordinator", "h:1", "--num-processes", "2", "--process-index", "0"), "--mesh"),
        (
            ("--coordinator", "h", "--num-processes", "2", "--process-index", "0", "--mesh", "1x2"),
            "--coordinator 'h': expected HOST:PORT",
        ),
        (
            (
                "--coordinator",
                "h:1",
                "--num-processes",
                "2",
                "--process-index",
                "2",
                "--mesh",
                "1x2",
            ),
            "--process-index 2 of --num-processes 2: it goes from 0 to 1",
        ),
    ],
)
def test_processes_are_named_in_full(flags, said, monkeypatch, capsys):
    test_the_command_line_refuses(flags, said, monkeypatch, capsys)


def test_what_one_process_cannot_use_all_refuse(monkeypatch):
    """As two processes that heard each other out: the one that failed, and the other."""
    monkeypatch.setattr(processes, "_gather", lambda mine: ["", mine or "t: a file is missing"])
    refused = pytest.raises(InputError, match=r"^process 1 of 2 stopped: t: a file is missing$")
    with refused, processes.all_or_none():
        pass
    with pytest.raises(InputError, match=r"^--out x: no directory$"), processes.all_or_none():
        raise InputError("--out x: no directory")
    monkeypatch.setattr(processes, "_gather", lambda mine: ["", mine])
    with processes.all_or_none():
        pass


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, "not all of the others came to --coordinator {}, where this one listens, within 2 s"),
        (1, "no answer from --coordinator {}, where process 0 listens, within 2 s"),
    ],
)
def test_a_coordinator_that_never_answers(checkpoints, index, said):
    """One message with the address, long before jax would abort the process."""
    flags = of_two(("--mesh", "1x8"), ("--mesh", "1x8"))[index]
    (ended,) = generate_together(checkpoints, (*flags, "--join-timeout", "2"))
    address = flags[flags.index("--coordinator") + 1]
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"jaxspec: process {index} of 2: {said.format(address)}")
    assert "Traceback" not in ended.err
    assert "stack trace" not in ended.err
