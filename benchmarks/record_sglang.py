"""Writes the record of given tokens through SGLang's own Python API, for `jaxspec compare`.

    python record_sglang.py DIR --tokens F --out R.safetensors [--dtype D] [--boundaries 1,3,5]
        [--features 2,30,58] [--top N] [--tensor-parallel-size N] [--engine JSON]

F is a JSON list of lists of ids (`jaxspec tokenize`). Runs where SGLang is installed, without
jaxspec.

SGLang 0.5.23's API, as its sources have it. `sgl.Engine` is given `forward_hooks`, whose factory,
`hook` below, is imported by the engine's own processes. Boundary 0 is what `embed_tokens` gives;
the last one is what the final norm adds up, and gives beside its output; those between are what
DeepSeek-V3 (and so Kimi-K2 and Kimi-K2.5) captures for EAGLE-3 at `layers_to_capture`, which is set
here, and what comes of it is taken off the model's output again. `return_hidden_states` alone would
give the state after the final norm, which is no boundary. The best logits are log-probabilities
(`top_logprobs_num`, of the input and, for the last position, of the one token that is generated);
chosen experts come with `return_routed_experts`.

What SGLang does not give, and the record does not have: logits beyond the best ones; routers'
margins; a draft's logits. States that are dealt out over ranks (`--engine '{"pp_size": 2}'`, data
parallel attention) are refused: their rows are not all in one place.

Never run with SGLang itself, which needs a GPU: tested against a small fake of these calls.
"""

import argparse
import base64
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_records as records
import numpy as np
from engine_records import RecorderError
from safetensors.numpy import load_file, save_file

MODELS = ("model", "language_model.model")
"""Where the layers are: of DeepSeek-V3 and Kimi-K2, and of Kimi-K2.5."""
SHORTEST_PASS = 2048
"""Tokens of a pass, if no sequence is longer."""

_seen: dict[str, np.ndarray] = {}
"""In an engine's process: what the hooks of a pass have seen before the model's own comes."""
_passes = itertools.count()


def hook(config: dict[str, Any]) -> Callable[[Any, tuple, Any], Any]:
    """A forward hook of SGLang's, on the part of the model that the config names."""
    folder = Path(config["folder"])

    def after_embedding(module: Any, inputs: tuple, output: Any) -> None:
        _seen["embedding"] = _rows(output)

    def after_norm(module: Any, inputs: tuple, output: Any) -> None:
        # Given a state and a residual it adds them up, and returns the sum beside its own output.
        _seen["last"] = _rows(output[1] if isinstance(output, tuple) else inputs[0])

    def after_model(module: Any, inputs: tuple, output: Any) -> Any:
        between = config["between"]
        captured = None
        if isinstance(output, tuple):
            output, captured = output
        if captured is not None and _is_writer(folder):
            parts = captured if isinstance(captured, list) else [captured]
            found = dict(_seen) | {"positions": inputs[1].cpu().numpy().astype(np.int32)}
            found["between"] = np.concatenate([_rows(part) for part in parts], axis=-1)
            path = folder / f"pass-{next(_passes):06d}.safetensors"
            save_file(found, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        _seen.clear()
        # From the next pass on: the first one is thrown away.
        module.layers_to_capture = list(between)
        return output

    return {"embedding": after_embedding, "norm": after_norm, "model": after_model}[config["part"]]


def _rows(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def _is_writer(folder: Path) -> bool:
    """Whether this process writes: the first that asks. All tensor-parallel ranks hold the same."""
    try:
        os.symlink(str(os.getpid()), folder / "writer")
    except FileExistsError:
        return os.readlink(folder / "writer") == str(os.getpid())
    return True


def parser() -> argparse.ArgumentParser:
    """The flags."""
    return records.parser("record_sglang", __doc__.split("\n")[0])


def main() -> None:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records.run("record_sglang", lambda: _record(args, Path(folder)))


def _record(args: Any, folder: Path) -> None:
    sequences = records.read_tokens(args.tokens)
    last = records.num_layers(args.directory)
    features = records.ids_of("--features", args.features, last)
    asked = records.ids_of("--boundaries", args.boundaries, last) or range(last + 1)
    wanted = sorted({*asked, *features})
    # One of them at least, so that the model has something to give.
    between = [b for b in wanted if 0 < b < last] or [1]
    sgl = records.import_engine("sglang", "pip install 'sglang[all]'")
    sparse = records.sparse_layers(args.directory)
    longest = max(map(len, sequences))
    engine = sgl.Engine(
        **records.engine_arguments(args.engine)
        | _engine(args, between, longest, str(folder), bool(sparse))
    )
    try:
        _ask(engine, sequences[0][:1], 0, False)
        of_sequence = []
        for ids in sequences:
            for path in folder.glob("pass-*"):
                path.unlink()
            answer = _ask(engine, ids, args.top, bool(sparse))
            arrays = _states(folder, len(ids), last, between, wanted)
            of_sequence.append(arrays | _said(answer["meta_info"], len(ids), args.top, sparse))
    finally:
        engine.shutdown()
    left_out = [
        "logits but the best ones, routers' margins and a draft's logits: SGLang has no call"
    ]
    missing = [b for b in wanted if not all(f"boundary.{b:03d}" in of for of in of_sequence)]
    if missing:
        left_out.append(
            f"boundaries {missing}: no hook of this version's model was called for them"
        )
    if sparse and not all(f"router.{sparse[0]:03d}" in of for of in of_sequence):
        left_out.append("chosen experts: this version did not return them")
    metadata = {
        "framework": "sglang",
        "framework_version": sgl.__version__,
        "model": args.directory.name,
        "dtype": args.dtype,
    }
    records.write(args.out, sequences, of_sequence, features, metadata, left_out)


def _engine(
    args: Any, between: list[int], longest: int, folder: str, has_experts: bool
) -> dict[str, Any]:
    """The arguments of `Engine`: each prompt in one pass, run as Python, so that hooks see it."""
    parts = {"embedding": ".embed_tokens", "norm": ".norm", "model": ""}
    return {
        "model_path": str(args.directory),
        "trust_remote_code": True,
        "dtype": args.dtype,
        "tp_size": args.tensor_parallel_size,
        "chunked_prefill_size": max(longest, SHORTEST_PASS),
        "max_running_requests": 1,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "enable_return_routed_experts": has_experts,
        "forward_hooks": [
            {
                "name": f"jaxspec-{part}",
                "target_modules": [model + suffix for model in MODELS],
                "hook_factory": "record_sglang:hook",
                "config": {"part": part, "folder": folder, "between": between},
            }
            for part, suffix in parts.items()
        ],
    }


def _ask(engine: Any, ids: list[int], top: int, has_experts: bool) -> dict[str, Any]:
    """What the engine says of one sequence; it generates one token."""
    return engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=bool(top),
        logprob_start_len=0 if top else None,
        top_logprobs_num=top or None,
        return_routed_experts=has_experts,
    )


def _states(
    folder: Path, length: int, last: int, between: list[int], wanted: list[int]
) -> dict[str, np.ndarray]:
    """The boundaries [T, D] that the hooks wrote of one sequence.

    Raises:
      RecorderError: they did not see the tokens of this sequence, one after another.
    """
    passes = [load_file(path) for path in sorted(folder.glob("pass-*.safetensors"))]
    if not passes:
        raise RecorderError(
            "no hook was called: this SGLang has no forward_hooks, runs the model as a graph, or "
            "its model has no layers_to_capture"
        )
    position = np.concatenate([one["positions"] for one in passes])[:length]
    if position.tolist() != list(range(length)):
        raise RecorderError(
            f"the hooks saw positions {position.tolist()} of a sequence of {length}"
        )
    arrays = {}
    for name in ("embedding", "between", "last"):
        rows = [one[name] for one in passes if name in one]
        if len(rows) < len(passes):
            continue
        if any(len(row) != len(one["positions"]) for row, one in zip(rows, passes, strict=True)):
            raise RecorderError(
                f"{name}: the hooks saw states of {len(rows[0])} tokens only, of a rank"
            )
        arrays[name] = np.concatenate(rows)[:length]
    chunks = np.split(arrays.pop("between"), len(between), axis=-1)
    found = dict(zip(between, chunks, strict=True))
    found |= {b: arrays[name] for b, name in ((0, "embedding"), (last, "last")) if name in arrays}
    return {f"boundary.{b:03d}": rows for b, rows in found.items() if b in wanted}


def _said(meta: dict[str, Any], length: int, top: int, sparse: list[int]) -> dict[str, np.ndarray]:
    """Best logits and chosen experts of one sequence, from what the engine says of it.

    Raises:
      RecorderError: it read other tokens.
    """
    if meta["prompt_tokens"] != length:
        raise RecorderError(f"SGLang read {meta['prompt_tokens']} tokens of {length}")
    arrays: dict[str, np.ndarray] = {}
    if top:
        # Those of position t stand with the token after it.
        rows = [*meta["input_top_logprobs"][1:length], meta["output_top_logprobs"][0]]
        plain = [{one[1]: one[0] for one in row} for row in rows]
        arrays |= records.top_arrays(plain, top)
    if sparse and "routed_experts" in meta:
        kind = meta.get("routed_experts_dtype", "int32")
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), kind)
        chosen_TLX = flat.reshape(length, sparse[-1] + 1, -1)
        arrays |= records.router_arrays(chosen_TLX, sparse)
    return arrays


if __name__ == "__main__":
    main()
