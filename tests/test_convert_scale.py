"""Conversion at Kimi's real sizes: complete indices from headers alone, and bounded memory."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxspec.convert.write import convert
from tests import real_layouts

GIB = 1024**3


@pytest.fixture
def place(tmp_path):
    """A directory that is removed at once: pytest keeps those of its last runs."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize(
    ("model", "num_tensors", "num_files", "gib"),
    [("kimi_k25", 208_550, 64, 554.3), ("kimi_k2_instruct", 139_644, 61, 958.5)],
)
def test_dry_run_of_a_complete_index(place, model, num_tensors, num_files, gib):
    """Names, shapes, dtypes and sizes of every tensor are checked, in two minutes at most."""
    directory = place / "source"
    config = getattr(real_layouts, f"{model}_config")()
    files = getattr(real_layouts, f"{model}_files")(config)
    real_layouts.write(directory, config, files)
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert sum(map(len, files.values())) == num_tensors
    assert (len(files), round(size / GIB, 1)) == (num_files, gib)
    used = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert used < 0.2 * GIB, "holes cost nothing"
    started, cpu = time.perf_counter(), time.process_time()
    report = convert(directory, place / "out", is_dry_run=True)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"{model}: dry run in {seconds:.1f} s, {cpu:.1f} s of one processor")
    assert seconds < 120
    assert list(place.iterdir()) == [directory]
    shapes = {leaf["path"]: leaf["shape"] for leaf in report.manifest.leaves}
    assert shapes["sparse.attention.out"] == [60, 64, 128, 7168]
    if model == "kimi_k25":
        assert shapes["experts.gate_up_words"] == [60, 384, 2, 2048, 896]
        num_vision = 6 + 3 + 27 * 12 + 2
        assert len(report.manifest.unused) == num_vision
    else:
        assert shapes["experts.gate_up"] == [60, 384, 2, 2048, 7168]
        assert len(report.manifest.unused) == 61
    largest = {}
    for piece in report.manifest.pieces:
        if "part" in piece and piece["layer"] is not None:
            largest[piece["layer"]] = max(piece["part"]["count"], largest.get(piece["layer"], 0))
    assert set(largest.values()) == {16 if model == "kimi_k25" else 6}


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (lambda t: t.pop("q_a_proj.weight"), ["q_a_proj.weight is missing", "[1536, 7168]"]),
        (
            lambda t: t.update({"q_a_proj.weight": ("BF16", (1536, 7167))}),
            ["q_a_proj.weight", "[1536, 7167]"],
        ),
        (lambda t: t.update({"q_a_proj.weight": ("I32", (1536, 7168))}), ["is I32", "BF16 or F32"]),
    ],
)
def test_dry_run_finds_one_wrong_tensor(place, edit, fragments):
    """Of thousands, at real widths: four layers and sixteen experts."""
    config = real_layouts.kimi_k25_config(num_hidden_layers=4, n_routed_experts=16)
    files = real_layouts.kimi_k25_files(config)
    shard = files["model-00003-of-000007.safetensors"]
    prefix = "language_model.model.layers.2.self_attn."
    short = {name.removeprefix(prefix): shard.pop(name) for name in list(shard) if prefix in name}
    edit(short)
    shard |= {prefix + name: entry for name, entry in short.items()}
    real_layouts.write(place / "source", config, files)
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn") as caught:
        convert(place / "source", place / "out", is_dry_run=True)
    for fragment in fragments:
        assert fragment in str(caught.value)


PEAK = """
def peak():  # getrusage would count what this process was forked from
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""
MEASURED = f"""
import json, sys
from jaxspec.convert.write import convert
{PEAK}
baseline = peak()
convert(sys.argv[1], sys.argv[2])
print(json.dumps(dict(baseline=baseline, peak=peak())))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_layer(place):
    """A dense and a whole MoE layer of 384 experts: 9.5 GB that are never in memory together.

    All holes but an embedding of 32,768 rows: zeros are read, repacked and handed to the store as
    anything is, and the store leaves out of its files what is zero.
    """
    config = real_layouts.kimi_k25_config(num_hidden_layers=2, vocab_size=32768)

    def fill(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        return np.ones(shape, dtype) if "embed_tokens" in name else None

    files = real_layouts.kimi_k25_files(config)
    real_layouts.write(place / "source", config, files, fill)
    command = [sys.executable, "-c", MEASURED, str(place / "source"), str(place / "out")]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    found = json.loads(done.stdout)
    manifest = json.loads((place / "out" / "manifest.json").read_text())
    total = sum(leaf["bytes"] for leaf in manifest["leaves"])
    largest = next(
        leaf["bytes"] for leaf in manifest["leaves"] if leaf["path"] == "experts.gate_up_words"
    )
    print(
        f"{total / 1e9:.1f} GB in {seconds:.0f} s; peak {found['peak'] / GIB:.2f} GiB, "
        f"of which {found['baseline'] / GIB:.2f} GiB before the first byte"
    )
    assert largest == 384 * 2 * 2048 * 896 * 4
    assert found["peak"] < 2 * GIB + largest
    assert found["peak"] < 4 * GIB, "far less: no layer is ever whole"


STEPPED = f"""
import json, sys
from jaxspec import GenerateConfig, generate, load_target
{PEAK}
target = load_target(sys.argv[1])
ids = [[5, 4096, 77, 8191, 3]]
config = GenerateConfig(None, max_new_tokens=6, context_length=16, prefill_chunk=8)
report = generate(target, None, ids, config)
tokens = report.to_dict()["prompts"][0]["tokens"]
print(json.dumps(dict(tokens=tokens, identity=target.identity, peak=peak())))
"""


def cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    return sum(os.times()[:4])


@pytest.mark.slow
def test_a_slice_of_full_width_converts_loads_and_steps(place):
    """7168 wide, one dense and one MoE layer of 32 experts, a vocabulary of 8192, random weights.

    Converted, and read straight from Hugging Face's files, it says the same.
    """
    config = real_layouts.kimi_k25_config(
        num_hidden_layers=2, n_routed_experts=32, vocab_size=8192, eos_token_id=8191
    )
    config |= {"eos_token_id": 8191}
    files = real_layouts.kimi_k25_files(config)
    source, out = place / "source", place / "out"
    started, cpu = time.perf_counter(), cpu_seconds()
    real_layouts.write(source, config, files, real_layouts.random_weights(1))
    written = time.perf_counter()
    converted = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(out)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peaks, answers = [json.loads(converted.stdout)["peak"]], []
    done = time.perf_counter()
    for directory in (out, source):
        command = [sys.executable, "-c", STEPPED, str(directory)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(ran.stdout.splitlines()[-1])
        peaks.append(answer.pop("peak"))
        answers.append(answer)
    print(
        f"written in {written - started:.0f} s, converted in {done - written:.0f} s, loaded and "
        f"stepped twice in {time.perf_counter() - done:.0f} s; peaks "
        f"{', '.join(f'{peak / GIB:.2f}' for peak in peaks)} GiB; {answers[0]['tokens']}; "
        f"{cpu_seconds() - cpu:.0f} s of processors"
    )
    assert answers[0] == answers[1]
    assert len(answers[0]["tokens"]) == 6
    assert max(peaks) < 10 * GIB
    assert cpu_seconds() - cpu < 2 * 180, "three minutes on two processors"
