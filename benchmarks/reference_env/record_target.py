"""Writes the record of given tokens through transformers' DeepSeek-V3, in f32.

    python record_target.py DIR --tokens F --out R.safetensors [--features 1,3,5] [--chunk N]
        [--expert-product exact|bfloat16] [--loading ours|theirs]

F is a JSON list of lists of ids. The record holds every boundary, the logits, the chosen experts of
every sparse layer (`router.LLL`, LLL the decoder layer) and how near each choice was
(`router_margin.LLL`). Each sequence runs alone, so nothing is padded.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
import transformers
from records import read_tokens, stack_rows, write_record
from target_model import load_target, load_theirs
from transformers import DeepseekV3ForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter


@dataclasses.dataclass
class Tap:
    """Collects what a model's layers see, call after call.

    Attributes:
      boundary: for each boundary, the states [T, D] of every call.
      expert: for each sparse layer, the chosen ids [T, X] of every call, ascending.
      margin: for each sparse layer, the near-tie margin [T] of every call.
    """

    boundary: dict[int, list[torch.Tensor]]
    expert: dict[int, list[torch.Tensor]]
    margin: dict[int, list[torch.Tensor]]

    @classmethod
    def on(cls, model: DeepseekV3ForCausalLM) -> "Tap":
        """A tap whose hooks are installed on the model for good."""
        tap = cls({}, {}, {})
        layers = model.model.layers
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(tap._boundary_hook(index))
            router = getattr(layer.mlp, "gate", None)
            if isinstance(router, DeepseekV3TopkRouter):
                router.register_forward_hook(tap._router_hook(index))
        model.model.norm.register_forward_pre_hook(tap._boundary_hook(len(layers)))
        return tap

    def clear(self) -> None:
        """Forgets what was collected."""
        for collected in (self.boundary, self.expert, self.margin):
            collected.clear()

    def arrays(self) -> dict[str, torch.Tensor]:
        """What was collected since the last `clear`, the calls joined, under a record's names."""
        kinds = {"boundary": self.boundary, "router": self.expert, "router_margin": self.margin}
        return {
            f"{kind}.{index:03d}": torch.cat(calls)
            for kind, collected in kinds.items()
            for index, calls in collected.items()
        }

    def _boundary_hook(self, index: int):
        def hook(module, args) -> None:
            self.boundary.setdefault(index, []).append(args[0][0].clone())

        return hook

    def _router_hook(self, index: int):
        def hook(router: DeepseekV3TopkRouter, args, output) -> None:
            logits, _, chosen = output
            self.expert.setdefault(index, []).append(chosen.sort(-1).values.int())
            self.margin.setdefault(index, []).append(choice_margin(router, logits))

        return hook


def choice_margin(router: DeepseekV3TopkRouter, logits_TE: torch.Tensor) -> torch.Tensor:
    """How far each token's choice is from another one, [T]: the smaller of the gaps between the
    last chosen and the first rejected expert and, where experts come in groups, between the last
    kept and the first dropped group (by the sum of a group's two best scores)."""
    score_TE = logits_TE.sigmoid() + router.e_score_correction_bias
    margin_T = torch.full(logits_TE.shape[:1], torch.inf)
    if router.topk_group < router.num_group:
        grouped = score_TE.unflatten(-1, (router.num_group, -1))
        best, group = grouped.topk(2)[0].sum(-1).sort(-1, descending=True)
        margin_T = best[:, router.topk_group - 1] - best[:, router.topk_group]
        dropped = torch.zeros_like(best, dtype=torch.bool)
        dropped.scatter_(1, group[:, router.topk_group :], True)
        score_TE = grouped.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
    if router.top_k < router.num_experts:
        best = score_TE.topk(router.top_k + 1).values
        margin_T = torch.minimum(margin_T, best[:, -2] - best[:, -1])
    return margin_T


@torch.no_grad()
def record(
    model: DeepseekV3ForCausalLM, tap: Tap, tokens: list[int], chunk: int
) -> dict[str, torch.Tensor]:
    """Arrays [T, ...] of one sequence, fed `chunk` tokens at a time through transformers' cache."""
    tap.clear()
    cache = DynamicCache(config=model.config)
    logits = []
    for start in range(0, len(tokens), chunk):
        ids = torch.tensor([tokens[start : start + chunk]])
        logits.append(model(input_ids=ids, cache=cache, use_cache=True).logits[0])
    return {**tap.arrays(), "logits": torch.cat(logits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="JSON list of lists of ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--features", help="boundaries to concatenate, as in 1,3,5; default none")
    parser.add_argument("--chunk", type=int, help="tokens per call; default the whole sequence")
    parser.add_argument("--expert-product", choices=["exact", "bfloat16"], default="exact")
    parser.add_argument(
        "--loading",
        choices=["ours", "theirs"],
        default="ours",
        help="theirs: transformers' from_pretrained of the packed checkpoint; all then in f32",
    )
    parser.add_argument("--model", help="name kept in the record; default the directory's")
    args = parser.parse_args()

    sequences = read_tokens(args.tokens)
    if args.loading == "theirs":
        model = load_theirs(args.directory)
    else:
        model = load_target(args.directory, args.expert_product)
    tap = Tap.on(model)
    of_sequence = [record(model, tap, ids, args.chunk or len(ids)) for ids in sequences]
    arrays = {name: stack_rows([of[name] for of in of_sequence]) for name in of_sequence[0]}
    arrays["tokens"] = stack_rows([torch.tensor(ids, dtype=torch.int32) for ids in sequences])
    arrays["lengths"] = torch.tensor([len(ids) for ids in sequences], dtype=torch.int32)
    if args.features:
        ids = [int(text) for text in args.features.split(",")]
        arrays["features"] = torch.cat([arrays[f"boundary.{i:03d}"] for i in ids], dim=-1)
    metadata = {
        "framework": "transformers",
        "framework_version": transformers.__version__,
        "model": args.model or args.directory.name,
        "dtype": "float32",
        "boundaries": args.features or "",
        "expert_product": args.expert_product if args.loading == "ours" else "transformers' own",
        "latent_norm_eps": str(model.config.rms_norm_eps),
    }
    write_record(args.out, arrays, metadata)


if __name__ == "__main__":
    main()
