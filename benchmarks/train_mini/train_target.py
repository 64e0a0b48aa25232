"""Trains the mini target: `python train_target.py --data DIR --out DIR --minutes 75`.

The learning rate falls linearly to zero over *elapsed time*, so a busy machine shortens the run and
never cuts the schedule. State is saved every few minutes; `--resume` continues from it, with other
window lengths if asked. `--start` begins with an exported target, whose vocabulary may be larger.
Set XLA_FLAGS=--xla_force_host_platform_device_count=<cores>.
"""

import argparse
import dataclasses
import functools
import json
import pickle
import time
from pathlib import Path

import ahead
import jax
import jax.numpy as jnp
import numpy as np
import optax
import read_export
import target
import tokenizer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

CAPACITY_FACTOR = 1.25  # training only; choices past it are dropped
BALANCE_RATE = 0.02  # step of the auxiliary-loss-free bias update, times the learning-rate decay
AHEAD_WEIGHTS = (2.0, 1.0)  # of the losses of the tokens after the next one
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95))


def loss_fn(params, config, ids, is_int4):
    """Returns (loss in nats, (those of the next token and of the ones after, tokens per expert,
    choices dropped))."""
    given = ids[:, :-1]
    logits, states, loads, dropped = target.forward(config, params, given, CAPACITY_FACTOR, is_int4)

    def nats(logits, probs):
        return -jnp.mean(jnp.sum(probs * jax.nn.log_softmax(logits), -1))

    losses = [nats(logits, jax.nn.one_hot(ids[:, 1:], config.vocab_size))]
    loss = losses[0]
    if "ahead" in params:
        said = jax.nn.softmax(jax.lax.stop_gradient(logits))
        guesses = ahead.logits(config, params, states, given, len(AHEAD_WEIGHTS))
        for depth, (weight, guess) in enumerate(zip(AHEAD_WEIGHTS, guesses, strict=True), 1):
            losses.append(nats(guess, said[:, depth:]))
            loss += weight * losses[-1]
    return loss, (jnp.stack(losses), loads, dropped)


def gradients(params, ids, config, is_int4):
    """Returns (losses, tokens per expert, share dropped, gradients), the mean over the cores.

    Every core takes its part of the batch, experts' capacity included: XLA:CPU runs gathers and
    many fusions on one thread, so two devices of one core beat one device of two.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("core",), axis_types=(AxisType.Auto,))

    def part(params, ids):
        (_, (losses, loads, dropped)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, config, ids, is_int4
        )
        return jax.lax.pmean((losses, loads, dropped / loads.sum(), grads), "core")

    split = jax.shard_map(
        part, mesh=mesh, in_specs=(P(), P("core")), out_specs=P(), check_vma=False
    )
    return split(params, ids)


@functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=(0, 1))
def train_step(params, state, ids, config, is_int4, rate, balance):
    """Returns (params, optimiser state, losses, share of choices dropped)."""
    losses, loads, dropped, grads = gradients(params, ids, config, is_int4)
    updates, state = OPTIMISER.update(grads, state)
    params = optax.apply_updates(params, optax.tree.scale(-rate, updates))
    for p, load in zip(params["layers"][1:], loads, strict=True):
        p["router_bias"] = p["router_bias"] + balance * jnp.sign(load.mean() - load)
    return params, state, losses, dropped


def windows(stream, length, batch, seed):
    """Yields `[batch, length + 1]` ids: each epoch a new offset and a new order of windows."""
    rng = np.random.default_rng(seed)
    while True:
        offset = rng.integers(length)
        starts = rng.permutation(np.arange(offset, len(stream) - length - 1, length))
        for i in range(0, len(starts) - batch + 1, batch):
            yield np.stack([stream[s : s + length + 1] for s in starts[i : i + batch]])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sum_loss(params, ids, config, is_int4):
    logits, _, _, dropped = target.forward(config, params, ids[:, :-1], 4.0, is_int4)
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, ids[:, 1:, None], -1).sum(), dropped


def heldout_loss(params, config, stream, length, batch, num_batches=None, is_int4=True):
    """Returns (nats per token, dropped choices) over whole windows, each from an empty context.

    `num_batches` takes that many batches, spread evenly over the stream; None takes all windows.
    """
    starts = np.arange(0, len(stream) - length - 1, length)
    num_batches = num_batches or len(starts) // batch
    starts = starts[np.linspace(0, len(starts) - 1, num_batches * batch).astype(int)]
    total, lost = 0.0, 0
    for i in range(0, len(starts), batch):
        ids = np.stack([stream[s : s + length + 1] for s in starts[i : i + batch]])
        loss, dropped = _sum_loss(params, ids.astype(np.int32), config, is_int4)
        total, lost = total + float(loss), lost + int(dropped)
    return total / (len(starts) * length), lost


def started(checkpoint, data, config):
    """Returns an exported target's parameters, as far as its ids are this vocabulary's.

    A BPE's merges are learnt one after the other, so a smaller vocabulary is the larger's
    beginning, and a token that is no longer there is written as several that are.
    """
    own, other = ((folder / "tiktoken.model").read_text() for folder in (data, checkpoint))
    if not other.startswith(own):
        raise SystemExit(f"the tokens of {data} are not the first of {checkpoint}'s")
    read, params = read_export.read_target(checkpoint)
    if (expected := dataclasses.replace(config, vocab_size=read.vocab_size)) != read:
        raise SystemExit(f"{checkpoint} is {read}, and what is trained {expected}")
    specials = tokenizer.NUM_SPECIAL
    kept = np.r_[: config.vocab_size - specials, read.vocab_size - specials : read.vocab_size]
    params |= {"embed": params["embed"][kept], "head": params["head"][:, kept]}
    return jax.tree.map(jnp.asarray, params)


def save(path, **state):
    """Writes the state to one file, replacing it in one move."""
    state = jax.tree.map(np.asarray, state)
    path.with_suffix(".tmp").write_bytes(pickle.dumps(state))
    path.with_suffix(".tmp").replace(path)


def main() -> None:
    """Runs the training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start", type=Path, help="an exported target to begin with")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--int4-from", type=float, default=0.6, help="share of time before int4")
    parser.add_argument("--ahead", action="store_true", help="predict the token after, too")
    parser.add_argument("--save-minutes", type=float, default=4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = (np.load(args.data / f"{part}.npy") for part in ("train", "heldout"))
    vocab_size = json.loads((args.data / "corpus.json").read_text())["vocab_size"]
    config = target.Config(vocab_size=vocab_size)
    start = args.start
    params = started(start, args.data, config) if start else target.init(config, seed=0)
    if args.ahead:
        params |= {"ahead": ahead.init(config, seed=1)}
    state = OPTIMISER.init(params)
    before, step, path = 0.0, 0, args.out / "state.pkl"
    if args.resume:
        loaded = pickle.loads(path.read_bytes())
        params, state = jax.tree.map(jnp.asarray, (loaded["params"], loaded["state"]))
        before, step = float(loaded["seconds"]), int(loaded["step"])
    batches = windows(train, args.length, args.batch, seed=step)
    began = saved = shown = time.time()
    for ids in batches:
        elapsed = before + time.time() - began
        share = elapsed / (args.minutes * 60)
        if share >= 1:
            break
        rate = min(1.0, (step + 1) / 60) * (1 - share)
        params, state, losses, dropped = train_step(
            params, state, ids.astype(np.int32), config, share >= args.int4_from,
            args.lr * rate, BALANCE_RATE * (1 - share),
        )  # fmt: skip
        jax.block_until_ready(losses)  # or steps queue up and the schedule runs ahead of them
        step += 1
        if time.time() - shown > 15:
            shown = time.time()
            line = {"step": step, "tokens": step * args.batch * args.length}
            line |= {"seconds": round(elapsed), "loss": [round(float(x), 4) for x in losses]}
            print(json.dumps(line | {"dropped": round(float(dropped), 4)}), flush=True)
        if time.time() - saved > args.save_minutes * 60:
            saved = time.time()
            held, lost = heldout_loss(params, config, heldout, args.length, args.batch, 6)
            print(json.dumps({"step": step, "heldout": held, "dropped": lost}), flush=True)
            save(path, params=params, state=state, seconds=elapsed, step=step)
    seconds = before + time.time() - began
    save(path, params=params, state=state, seconds=seconds, step=step)
    held, lost = heldout_loss(params, config, heldout, args.length, args.batch)
    tokens = step * args.batch * args.length
    print(json.dumps({"done": step, "tokens": tokens, "heldout": held, "dropped": lost}))


if __name__ == "__main__":
    main()
