"""Writes the tensors of a safetensors file as `torch.save` does.

    python save_torch.py IN.safetensors OUT.bin

As a state dict is: ordered, with the metadata of a module, every other tensor a parameter. A tensor
whose name ends in `.rows` is saved as rows 1 to 3 of itself, so that it begins within its storage.
"""

import collections
import sys

import torch
from safetensors.torch import load_file


def main() -> None:
    source, out = sys.argv[1:]
    state = collections.OrderedDict()
    for index, (name, tensor) in enumerate(load_file(source).items()):
        if name.endswith(".rows"):
            tensor = tensor[1:3]
        is_parameter = index % 2 and tensor.is_floating_point()
        state[name] = torch.nn.Parameter(tensor) if is_parameter else tensor
    state._metadata = collections.OrderedDict({"": {"version": 1}})
    torch.save(state, out)


if __name__ == "__main__":
    main()
