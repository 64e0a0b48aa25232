"""Slots: tiles of choices that share an expert, and so a read of its weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Slots", "assign", "most_slots"]


class Slots(NamedTuple):
    """Which choices share a read. A slot has `tile` rows; those in use come first.

    Attributes:
      row: [M,X] the row of each choice; of a choice that is no expert, one past the last.
      table: the token of each row (0 of a row that no choice fills), then the expert of each slot,
        then the number of slots in use: one array, because each takes a kernel to compute.
    """

    row: jax.Array
    table: jax.Array


def most_slots(num_choices: int, num_experts: int, tile: int) -> int:
    """How many slots that many choices can need: each expert has at most one that is not full."""
    most_experts = min(num_experts, num_choices)
    return most_experts + (num_choices - most_experts) // tile


def assign(expert_MX: jax.Array, num_experts: int, tile: int) -> Slots:
    """Slots of at most `tile` choices of one expert; ids outside 0..num_experts-1 get none.

    Two sums of comparisons and a scatter, one kernel each: a sort or a binary search takes several.
    """
    num_choices, choices_per_token = expert_MX.size, expert_MX.shape[1]
    num_slots = most_slots(num_choices, num_experts, tile)
    num_rows = num_slots * tile

    def count(is_counted: jax.Array) -> jax.Array:
        return is_counted.sum(1, dtype=jnp.int32)

    choice_C = jnp.arange(num_choices, dtype=jnp.int32)
    expert_C = expert_MX.reshape(-1).astype(jnp.int32)
    is_expert_C = (expert_C >= 0) & (expert_C < num_experts)
    is_same_CC = expert_C[None] == expert_C[:, None]
    place_C = count(is_same_CC & (choice_C[None] < choice_C[:, None]))  # among its expert's
    is_first_C = is_expert_C & (place_C % tile == 0)  # of a slot
    slot_C = count(is_first_C[None] & (expert_C[None] < expert_C[:, None])) + place_C // tile
    row_C = jnp.where(is_expert_C, slot_C * tile + place_C % tile, num_rows)

    end = num_rows + num_slots
    out_of_bounds = end + 1
    at_3C = jnp.concatenate(
        [
            jnp.where(is_expert_C, row_C, out_of_bounds),
            jnp.where(is_first_C, num_rows + slot_C, out_of_bounds),
            jnp.where(is_first_C, end, out_of_bounds),
        ]
    )
    value_3C = jnp.concatenate([choice_C // choices_per_token, expert_C, jnp.ones_like(expert_C)])
    table = jnp.zeros((end + 1,), jnp.int32).at[at_3C].add(value_3C, mode="drop")
    return Slots(row_C.reshape(expert_MX.shape), table)
