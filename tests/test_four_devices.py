"""Training, and recording for it, on a mesh gives what one device gives.

Runs are on four CPU devices, in a process of their own: `on_four_devices.py`.
"""

import collections
import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec import cli
from jaxspec.collectives import over_groups, share, whole_gradient
from jaxspec.config import MeshConfig, Numerics
from jaxspec.errors import InputError
from jaxspec.sharding import specs_of
from jaxspec.training import LossConfig, Trainer, state_cuts
from tests import on_four_devices as program
from tests import tiny

ROOT = Path(__file__).parent.parent
MESHES = ("1x2", "2x1", "2x2")


@functools.cache
def told(*asked: str) -> dict[str, Any]:
    """What the program says."""
    command = [sys.executable, "-m", "tests.on_four_devices", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [("llama", *MESHES), ("latent", "2x2")], ids=" ".join)
def test_loss_and_gradients_are_those_of_one_device(asked):
    found = told("gradients", *asked)
    cut, whole = {"attention.out", "mlp.gate", "head"}, {"fc", "hidden_norm.weight"}
    for mesh in asked[1:]:
        assert found[mesh]["loss"] <= 1e-5
        away = found[mesh]["gradient"]
        assert away.keys() >= cut | whole | {"later.attention.out", "later.post_norm.weight"}
        assert max(away.values()) <= 1e-5, (mesh, away)


@pytest.mark.slow
def test_a_run():
    """The same draft up to rounding, in the same layout; and the same bits after a kill."""
    found = told("run", "2x2")
    assert found["is_same_after_a_kill"] and found["killed"]["resumed_at"] == 2
    assert found["killed"]["evaluations"] == found["mesh"]["evaluations"]
    assert found["shapes"][0] == found["shapes"][1]
    # Adam's steps are of the rate's size however small the gradient, so that rounding may show.
    assert found["away"] < 0.1 * program.OPTIMIZER.learning_rate
    for want, got in zip(found["alone"]["evaluations"], found["mesh"]["evaluations"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3)
        assert got["accept_ceiling"] == want["accept_ceiling"]
        assert 1 <= got["accept_length"] <= 2
    assert "of another run" in found["elsewhere"]
    assert "mesh is '2x2' there and None here" in found["elsewhere"]


@pytest.mark.slow
def test_features_are_those_of_one_device():
    found = told("features", "2x2")
    away, (computed, recorded) = found["away"], found["losses"]
    assert away.keys() == {"tokens", "lengths", "loss_mask", "features", "boundary.004"}
    assert max(away.values()) <= 1e-5, away
    assert recorded == pytest.approx(computed, rel=1e-5)


@pytest.mark.slow
def test_the_doctor_finds_what_it_finds_on_one_device():
    found = told("doctor", "2x2")
    alone, mesh = found["alone"], found["mesh"]
    assert mesh["texts"] == alone["texts"] and mesh["num_rows"] > 200
    assert len(alone["readings"]) == 6
    of = {reading["name"]: reading for reading in mesh["readings"]}
    for want in alone["readings"]:
        got = of[want["name"]]
        assert got["gain"] == pytest.approx(want["gain"], abs=1e-5)
        near = {name: pytest.approx(value, rel=1e-4) for name, value in want["figures"].items()}
        assert got["figures"] == near
        assert got["verdict"] == want["verdict"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_state_lies_as_its_parameters_do(optimizer, target, draft):
    """Whatever the optimiser keeps of a parameter is cut as that is; what it has besides is not."""
    config = dataclasses.replace(program.OPTIMIZER, name=optimizer)
    state = Trainer(target, draft, LossConfig(1), config).new_state()
    cuts = specs_of(state.trained, MeshConfig(1, 2))
    found = state_cuts(state, cuts)
    kept = collections.Counter()
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(found), strict=True)
    for (path, leaf), cut in pairs:
        name = getattr(path[-1], "key", None)
        kept[name] += 1
        assert cut == cuts.get(name, P())
        assert name not in cuts or leaf.shape == state.trained[name].shape
    assert all(kept[name] >= 3 for name in cuts), "itself, its momentum, its gradients' sum"
    assert tuple(cuts["attention.query"]) == (None, "model", None) and cuts["fc"] == P()


def test_without_a_mesh_nothing_is_exchanged():
    x = {"fc": np.ones(3)}
    assert over_groups(x["fc"], None) is x["fc"] is share(x["fc"], None)
    assert whole_gradient(x, {}, None) is x
    assert whole_gradient(x, {"fc": P()}, MeshConfig(1, 1))["fc"] is x["fc"]
    assert share(np.float32(3), MeshConfig(2, 3)) == 0.5


def test_a_mesh_that_does_not_fit_is_refused(target, draft):
    numerics = Numerics(dtype="float32", mesh=MeshConfig(1, 5))
    on_five = tiny.target_module(
        tiny.target_tensors(tiny.TARGET_CONFIG), tiny.TARGET_CONFIG, numerics
    )
    with pytest.raises(InputError, match="the target is on mesh 1x5, and its draft on None"):
        Trainer(on_five, draft, LossConfig(1), program.OPTIMIZER)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mesh", "8"), "mesh '8': expected DATAxMODEL"),
        (("--mesh", "1x7"), "its 7 devices (MODEL) do not divide the target's"),
        (("--mesh", "2x1"), "mesh 2x1 takes 2 devices, and there are 1"),
    ],
)
def test_the_command_line_refuses(flags, said, monkeypatch, capsys, tmp_path):
    argv = ["jaxspec", "train-draft", "--tokens", "ids.json", "--out", "out", *flags]
    monkeypatch.setattr(sys, "argv", [*argv, "--compile-cache", "none"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text(json.dumps([list(range(40))]))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("jaxspec: ")
    assert not (tmp_path / "out").exists()
