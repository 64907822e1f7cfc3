"""One analysis over several processes, each reading its share of the text.

    torchrun --nproc-per-node 2 examples/distributed.py

Nothing is passed to the package: it finds torch.distributed initialised, hands row i of the text to
process i modulo their number and adds the sums up, so every process returns the same result.
"""

import os

import torch
from torch import distributed

import tl_valuealign as va

if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    device = torch.device("cuda", torch.cuda.current_device())
else:
    distributed.init_process_group("gloo")
    device = torch.device("cpu")

try:
    model = va.pocket_model().to(device)
    result = va.analyze_value_alignment(model, progress=distributed.get_rank() == 0)
    if distributed.get_rank() == 0:
        print(result.summary())
        print(f"read by {result.provenance['processes']} processes")
finally:
    distributed.destroy_process_group()
