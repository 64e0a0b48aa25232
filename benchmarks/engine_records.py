"""What `record_sglang.py` and `record_vllm.py` share: flags, tokens in, a record out.

They run where the engine is installed, which is where jaxspec is not: numpy and safetensors are all
that is imported here.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FORMAT = "jaxspec-record-1"
LOG_PROBABILITIES = "log-probabilities"
"""What `logits.top` are: up to a number that is the same for a whole row, which compare knows."""


class RecorderError(Exception):
    """Something given cannot be used; the message is for the user."""


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """The flags that both have."""
    flags = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("directory", type=Path, help="the target, a Hugging Face directory")
    flags.add_argument("--tokens", type=Path, required=True, help="JSON list of lists of ids")
    flags.add_argument("--out", type=Path, required=True, help="the record")
    flags.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    flags.add_argument("--tensor-parallel-size", type=int, default=1)
    flags.add_argument("--boundaries", help="those to record, as in 1,31,60; default: all")
    flags.add_argument("--features", help="boundaries to concatenate, as in 2,30,58; default: none")
    flags.add_argument("--top", type=int, default=64, help="best logits of each position; 0: none")
    flags.add_argument(
        "--engine", default="{}", help="JSON of further arguments of the engine, before all others"
    )
    return flags


def run(program: str, work: Callable[[], None]) -> None:
    """Does the work; what was refused is a line on stderr, and exit status 2."""
    try:
        work()
    except RecorderError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


def import_engine(name: str, install: str) -> Any:
    """The engine's package.

    Raises:
      RecorderError: it is not installed here.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecorderError(
            f"{name} cannot be imported ({error}): this program runs in the environment that the "
            f"engine is installed in; {install}"
        ) from error


def read_tokens(path: Path) -> list[list[int]]:
    """The sequences of a JSON list of lists of ids, as `jaxspec tokenize` prints it.

    Raises:
      RecorderError: it holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecorderError(f"--tokens {path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, list) or not found or not all(map(_is_ids, found)):
        raise RecorderError(
            f"--tokens {path}: expected a JSON list of non-empty lists of token ids"
        )
    return found


def num_layers(directory: Path) -> int:
    """Of the text model of a Hugging Face directory.

    Raises:
      RecorderError: it is none.
    """
    try:
        return int(_text_config(directory)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise RecorderError(
            f"{directory}: no config.json that says num_hidden_layers ({error})"
        ) from error


def ids_of(flag: str, text: str | None, last: int) -> tuple[int, ...]:
    """Boundaries as a flag names them; empty where it is not given.

    Raises:
      RecorderError: they are none of the model's.
    """
    parts = text.split(",") if text else []
    if not all(part.strip().isdigit() and int(part) <= last for part in parts):
        raise RecorderError(
            f"{flag} {text}: expected boundaries from 0 (the embedding output) to {last} (before "
            "the final norm), as in 1,3,5"
        )
    return tuple(map(int, parts))


def engine_arguments(text: str) -> dict[str, Any]:
    """What --engine says.

    Raises:
      RecorderError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RecorderError(f"--engine {text!r}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise RecorderError(f"--engine {text!r}: expected an object")
    return found


def top_arrays(rows: Sequence[Mapping[int, float]], count: int) -> dict[str, np.ndarray]:
    """`logits.top` and `logits.top_ids` [T, k], best first, of each position's log-probabilities by
    id, of which an engine may give one more than it was asked for: the token's own.

    Raises:
      RecorderError: a position has fewer.
    """
    fewest = min(map(len, rows))
    if fewest < count:
        raise RecorderError(
            f"the engine gave {fewest} log-probabilities of a position; --top is {count}"
        )
    best = [sorted(row.items(), key=lambda item: -item[1])[:count] for row in rows]
    return {
        "logits.top": np.array([[value for _, value in row] for row in best], np.float32),
        "logits.top_ids": np.array([[token for token, _ in row] for row in best], np.int32),
    }


def router_arrays(chosen_TLX: np.ndarray, sparse: Sequence[int]) -> dict[str, np.ndarray]:
    """`router.LLL` [T, X] of the sparse layers."""
    return {f"router.{layer:03d}": chosen_TLX[:, layer].astype(np.int32) for layer in sparse}


def sparse_layers(directory: Path) -> list[int]:
    """The layers with routed experts, by the config's DeepSeek-V3 fields; none of another model."""
    text = _text_config(directory)
    if not text.get("n_routed_experts"):
        return []
    first, every = text.get("first_k_dense_replace", 0), text.get("moe_layer_freq", 1)
    return [i for i in range(text["num_hidden_layers"]) if i >= first and i % every == 0]


def write(
    out: Path,
    sequences: Sequence[Sequence[int]],
    of_sequence: Sequence[Mapping[str, np.ndarray]],
    features: Sequence[int],
    metadata: Mapping[str, str],
    left_out: Sequence[str],
) -> None:
    """Writes the record; what the engine could not give is said on stderr and in its metadata.

    Args:
      of_sequence: of each sequence its arrays [T, ...]. Those that only some have are left out.
      features: the boundaries to concatenate.

    Raises:
      RecorderError: the features need a boundary that is not there, or the file cannot be written.
    """
    names = set.intersection(*(set(of) for of in of_sequence))
    lacking = [b for b in features if f"boundary.{b:03d}" not in names]
    if lacking:
        raise RecorderError(
            f"--features: boundaries {lacking} were not recorded; {'; '.join(left_out)}"
        )
    arrays = {name: _stack([of[name] for of in of_sequence]) for name in sorted(names)}
    if features:
        chunks = [arrays[f"boundary.{b:03d}"] for b in features]
        arrays["features"] = np.concatenate(chunks, axis=-1)
    arrays["tokens"] = _stack([np.array(ids, np.int32) for ids in sequences])
    arrays["lengths"] = np.array([len(ids) for ids in sequences], np.int32)
    said = {"boundaries": ",".join(map(str, features)), "left_out": "; ".join(left_out)}
    if "logits.top" in arrays:
        said["logits"] = LOG_PROBABILITIES
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    try:
        save_file(arrays, out, {"format": FORMAT, **metadata, **said})
    except Exception as error:  # safetensors has its own kinds for what the disk says
        raise RecorderError(f"--out {out}: cannot be written ({error})") from error
    for what in left_out:
        print(f"left out: {what}", file=sys.stderr)


def _text_config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text("utf-8"))
    return config.get("text_config", config)


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows [T_b, ...] of every sequence as one [B, T, ...], zero after each one's length."""
    longest = max(map(len, rows))
    fill = [(0, 0)] * (rows[0].ndim - 1)
    return np.stack([np.pad(row, [(0, longest - len(row)), *fill]) for row in rows])


def _is_ids(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(type(i) is int for i in row)
