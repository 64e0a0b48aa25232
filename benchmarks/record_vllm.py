"""Writes the record of given tokens through vLLM's own Python API, for `jaxspec compare`.

    python record_vllm.py DIR --tokens F --out R.safetensors [--dtype D] [--boundaries 1,3,5]
        [--features 2,30,58] [--top N] [--experts] [--tensor-parallel-size N] [--engine JSON]

F is a JSON list of lists of ids (`jaxspec tokenize`). Runs where vLLM is installed, without
jaxspec.

vLLM 0.33.0's API, as its sources have it. Boundaries come by its hidden-state extraction
(`speculative_config` with method "extract_hidden_states", and the `ExampleHiddenStatesConnector`),
whose layer ids are boundaries; the best logits as log-probabilities (`prompt_logprobs`, and for the
last position `logprobs` of the one token that is generated); with --experts the chosen experts
(`enable_return_routed_experts`, which vLLM has with prefix caching and its second model runner).

What vLLM does not give, and the record does not have: boundary 0, since its DeepSeek-V3 cannot
capture before the first layer; logits beyond the best ones; routers' margins; a draft's logits.

Never run with vLLM itself, which needs a GPU: tested against a small fake of these calls.
"""

import argparse
import importlib
import tempfile
from pathlib import Path
from typing import Any

import engine_records as records
import numpy as np
from engine_records import RecorderError

CONNECTOR = "ExampleHiddenStatesConnector"
CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = records.parser("record_vllm", __doc__.split("\n")[0])
    flags.add_argument("--experts", action="store_true", help="record the chosen experts too")
    return flags


def main() -> None:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records.run("record_vllm", lambda: _record(args, Path(folder)))


def _record(args: Any, folder: Path) -> None:
    sequences = records.read_tokens(args.tokens)
    last = records.num_layers(args.directory)
    features = records.ids_of("--features", args.features, last)
    asked = records.ids_of("--boundaries", args.boundaries, last) or range(last + 1)
    boundaries = sorted({*asked, *features} - {0})
    vllm = records.import_engine("vllm", "pip install vllm")
    connector = importlib.import_module(CONNECTOR_MODULE)
    llm = vllm.LLM(
        **records.engine_arguments(args.engine)
        | _engine(args, boundaries, max(map(len, sequences)), str(folder))
    )
    # The prompt's own log-probabilities are never read from the prefix cache.
    how = vllm.SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=args.top or None,
        prompt_logprobs=args.top or None,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], how)
    sparse = records.sparse_layers(args.directory) if args.experts else []
    of_sequence = [
        _arrays(connector, output, ids, boundaries, args.top, sparse)
        for output, ids in zip(outputs, sequences, strict=True)
    ]
    left_out = ["logits but the best ones, routers' margins and a draft's logits: vLLM has no call"]
    if not args.experts:
        left_out.append("chosen experts: --experts records them")
    if 0 in {*asked, *features}:
        left_out.append("boundary 0: vLLM's DeepSeek-V3 cannot capture before its first layer")
    metadata = {
        "framework": "vllm",
        "framework_version": vllm.__version__,
        "model": args.directory.name,
        "dtype": args.dtype,
    }
    records.write(args.out, sequences, of_sequence, features, metadata, left_out)


def _engine(args: Any, boundaries: list[int], longest: int, folder: str) -> dict[str, Any]:
    """The arguments of `LLM`: each prompt in one pass, nothing compiled, every boundary kept."""
    room = longest + 2
    return {
        "model": str(args.directory),
        "trust_remote_code": True,
        "dtype": args.dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_model_len": room,
        "max_num_batched_tokens": max(room, 2048),
        "enable_chunked_prefill": False,
        "enforce_eager": True,
        "max_logprobs": max(args.top, 1),
        "enable_prefix_caching": args.experts,
        "enable_return_routed_experts": args.experts,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}},
        },
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }


def _arrays(
    connector: Any, output: Any, ids: list[int], boundaries: list[int], top: int, sparse: list[int]
) -> dict[str, np.ndarray]:
    """The arrays [T, ...] of one sequence.

    Raises:
      RecorderError: vLLM read other ids, or gave states of other boundaries than it was asked for.
    """
    path = output.kv_transfer_params["hidden_states_path"]
    found = connector.load_hidden_states(path)
    connector.cleanup_hidden_states(path)
    states_TKD = found["hidden_states"].float().numpy()
    read = found["token_ids"].tolist()
    if read != ids or list(output.prompt_token_ids) != ids:
        raise RecorderError(f"vLLM read other ids than the {len(ids)} it was given")
    if states_TKD.shape[:2] != (len(ids), len(boundaries)):
        raise RecorderError(
            f"vLLM gave states {list(states_TKD.shape)} of {len(ids)} tokens and "
            f"{len(boundaries)} boundaries"
        )
    arrays = {f"boundary.{b:03d}": states_TKD[:, i] for i, b in enumerate(boundaries)}
    (completion,) = output.outputs
    if top:
        # Those of position t stand with the token after it.
        rows = [*output.prompt_logprobs[1:], completion.logprobs[0]]
        plain = [{token: one.logprob for token, one in row.items()} for row in rows]
        arrays |= records.top_arrays(plain, top)
    if sparse:
        chosen_TLX = np.asarray(completion.routed_experts)[: len(ids)]
        if len(chosen_TLX) != len(ids):
            raise RecorderError(f"vLLM gave the experts of {len(chosen_TLX)} of {len(ids)} tokens")
        arrays |= records.router_arrays(chosen_TLX, sparse)
    return arrays


if __name__ == "__main__":
    main()
