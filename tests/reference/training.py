"""The loss of EAGLE-3's training-time test, from its definition, in float64.

row i of step 0:  features of position i, token i + 1, at position i; sees rows 0..i
row i of step s:  its own output of step s - 1, token i + 1 + s, at position i + s; sees the rows
                  0..i of step 0 and its own row of the steps 1..s
it is compared with the target's distribution at position i + 1 + s
"""

import numpy as np

from tests.reference import formulas
from tests.reference.draft import ReferenceDraft


def training_loss(
    draft: ReferenceDraft,
    features: np.ndarray,
    tokens: np.ndarray,
    probs: np.ndarray,
    is_learned: np.ndarray,
    num_steps: int,
) -> list[float]:
    """The mean cross-entropy of every step, over the rows of one sequence that count.

    Args:
      features: [T,G]; tokens: [T]; probs: [T,U], the labels; is_learned: [T], of positions.
    """
    length, losses = len(tokens), []
    # Tokens past the end belong to rows that do not count.
    padded = np.concatenate([tokens, np.zeros(num_steps, tokens.dtype)])
    hidden = [draft.fuse(features)]
    fed, positions = [padded[1 : length + 1]], [np.arange(length)]
    sees = [formulas.causal(length)]
    for step in range(num_steps):
        if step:
            fed.append(padded[step + 1 : step + 1 + length])
            positions.append(np.arange(length) + step)
        size = length * (step + 1)
        mask = np.zeros((size, size), bool)
        for at in range(step + 1):
            rows = slice(at * length, (at + 1) * length)
            mask[rows, :length] = sees[0]
            for before in range(1, at + 1):
                mask[rows, before * length : (before + 1) * length] = np.eye(length, dtype=bool)
        out = draft.run(
            np.concatenate(hidden), np.concatenate(fed), np.concatenate(positions), mask
        )[-length:]
        hidden.append(out)
        log = formulas.log_softmax(draft.logits(out))
        count = length - 1 - step
        row_loss = -(probs[step + 1 :] * log[:count]).sum(-1)
        losses.append(float(row_loss[is_learned[step + 1 :]].mean()))
    return losses
