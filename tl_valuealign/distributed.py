"""Many processes: each reads its share of the sequences, and the sums are added up over all.

Nothing to switch on: where ``torch.distributed`` is initialised (``torchrun``), row i of the text
goes to process i modulo their number, and every process returns the same result.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def share() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its sum over all processes, in place."""
    if share()[1] == 1:
        return
    for tensor in tensors:
        total = tensor.to(_place(tensor), copy=True)
        dist.all_reduce(total)
        tensor.copy_(total)


def merge(value: Any) -> Any:
    """The sum, by ``+``, of what every process has; None where they have None."""
    world = share()[1]
    if world == 1 or value is None:
        return value
    found: list[Any] = [None] * world
    dist.all_gather_object(found, value)
    return reduce(operator.add, found)


def _place(tensor: Tensor) -> torch.device:
    """NCCL sums on its GPU, gloo on the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
