"""Trains the mini draft on a trained target: `python train_draft.py --data DIR --target DIR ...`.

The target is used exactly as it is exported (int4 experts, bf16 elsewhere) and stays frozen.
"""

import argparse
import functools
import json
import pickle
import time
from pathlib import Path
from typing import NamedTuple

import draft
import jax
import jax.numpy as jnp
import numpy as np
import optax
import target
import train_target
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

CAPACITY_FACTOR = 1.5  # the target's experts: few choices are dropped


def as_exported(config: target.Config, params: target.Params) -> target.Params:
    """Returns the parameters with the exported checkpoint's values: int4 experts, others bf16."""

    def value(path, leaf):
        names = [getattr(key, "key", None) for key in path]
        if "router_bias" in names:
            return leaf  # float32 in the checkpoint
        if "experts" in names:
            return target.fake_int4(leaf, config.group_size)
        return leaf.astype(jnp.bfloat16).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(value, params)


def load_target(directory: Path, data: Path) -> tuple[target.Config, target.Params]:
    """Returns a trained target's config and its parameters as exported."""
    vocab_size = json.loads((data / "corpus.json").read_text())["vocab_size"]
    config = target.Config(vocab_size=vocab_size)
    params = pickle.loads((directory / "state.pkl").read_bytes())["params"]
    return config, as_exported(config, jax.tree.map(jnp.asarray, params))


def features_and_logits(config, params, ids, boundaries, capacity_factor=CAPACITY_FACTOR):
    """Returns (concatenated boundaries `[B, T, G]`, the target's logits)."""
    logits, states, _, _ = target.forward(config, params, ids, capacity_factor, is_int4=False)
    return jnp.concatenate([states[b] for b in boundaries], -1), logits


class Loss(NamedTuple):
    """What is asked of the draft.

    Attributes:
      num_steps: recurrent steps of the training-time test.
      step_weight: what a step counts, over the one before it.
      temperature: at which the target's probabilities are taken.
    """

    num_steps: int
    step_weight: float
    temperature: float


def loss_fn(p, config, loss, embed, features, logits, ids, draft_ids):
    """Returns the weighted cross-entropy against the target's distribution, summed over steps.

    The label is the target's probability of each draft token; what lies outside the draft's
    vocabulary is left out, so a position counts as much as the draft can cover of it.
    """
    label = jax.nn.softmax(logits / loss.temperature)[..., draft_ids]
    total = 0.0
    for s, out in enumerate(draft.unroll(config, p, features, embed, ids, loss.num_steps)):
        want = label[:, s + 1 : s + 1 + out.shape[1]]
        step_loss = -jnp.mean(jnp.sum(want * jax.nn.log_softmax(out), -1))
        total += loss.step_weight**s * step_loss
    return total


def optimiser(p: dict) -> optax.GradientTransformation:
    """Muon for the layer's matrices, Adam for head and norms; updates for a learning rate of 1.

    Muon's are scaled to Adam's usual size, so that one rate serves both (arXiv:2502.16982).
    """
    kinds = {
        name: MuonDimensionNumbers() if leaf.ndim == 2 and name != "head" else None
        for name, leaf in p.items()
    }
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(1.0, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=kinds),
    )


@functools.partial(jax.jit, static_argnums=(4, 5, 6), donate_argnums=(0, 1))
def train_step(p, state, target_params, ids, config, target_config, asked, draft_ids, rate):
    """Returns (parameters, optimiser state, loss)."""
    mesh = jax.make_mesh((jax.device_count(),), ("core",), axis_types=(AxisType.Auto,))

    def part(p, target_params, ids):
        features, logits = features_and_logits(target_config, target_params, ids, config.boundaries)
        loss, grads = jax.value_and_grad(loss_fn)(
            p, config, asked, target_params["embed"], features, logits, ids, draft_ids
        )
        return jax.lax.pmean((loss, grads), "core")

    specs = (P(), P(), P("core"))
    loss, grads = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
        p, target_params, ids
    )
    updates, state = optimiser(p).update(grads, state, p)
    return optax.apply_updates(p, optax.tree.scale(rate, updates)), state, loss


def frequent_ids(stream: np.ndarray, vocab_size: int, num_ids: int) -> np.ndarray:
    """Returns the most frequent ids of the training text, ascending."""
    counts = np.bincount(stream, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:num_ids])


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="train_target's --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--start", type=Path, help="a draft's directory to start from")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the text")
    parser.add_argument("--num-steps", type=int, default=4, help="of the training-time test")
    parser.add_argument(
        "--one-step-share",
        type=float,
        default=0.5,
        help="of the time, at first, with one step: twice as many tokens are seen",
    )
    parser.add_argument(
        "--step-weight", type=float, default=0.8, help="of a step, over that of the one before"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the target's labels")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stream = np.load(args.data / "train.npy")
    target_config, target_params = load_target(args.target, args.data)
    config = draft.Config()
    draft_ids = frequent_ids(stream, target_config.vocab_size, config.draft_vocab_size)
    p = draft.init(config, target_params, draft_ids, seed=0)
    if args.start:
        loaded = pickle.loads((args.start / "draft.pkl").read_bytes())
        p = jax.tree.map(jnp.asarray, loaded["params"])
    state = optimiser(p).init(p)
    began = shown = saved = time.time()
    step = 0

    def save() -> None:
        train_target.save(args.out / "draft.pkl", params=p, draft_ids=draft_ids, step=step)

    for ids in train_target.windows(stream, args.length - 1, args.batch, args.seed):
        share = (time.time() - began) / (args.minutes * 60)
        if share >= 1:
            break
        num_steps = 1 if share < args.one_step_share else args.num_steps
        rate = args.lr * min(1.0, (step + 1) / 40) * (1 - share)
        p, state, loss = train_step(
            p,
            state,
            target_params,
            ids.astype(np.int32),
            config,
            target_config,
            Loss(num_steps, args.step_weight, args.temperature),
            draft_ids,
            rate,
        )
        loss.block_until_ready()  # or steps queue up and the schedule runs ahead of them
        step += 1
        if time.time() - shown > 15:
            shown = time.time()
            line = {"step": step, "seconds": round(shown - began), "loss": round(float(loss), 4)}
            print(json.dumps(line), flush=True)
        if time.time() - saved > 180:
            saved = time.time()
            save()
    save()
    print(json.dumps({"done": step, "tokens": step * args.batch * args.length}))


if __name__ == "__main__":
    main()
