"""A recording replayed step by step, where kernels are run by an executor and not by the driver: in the simulator.

Each tensor has memory of its own, and launches are given tensors, so that every check of an executor is as in a first call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._kernel.launch.versions import in_role
from .steps import Alloc, Bump, Launch, Step, filled


def run(steps: Sequence[Step], tensors: dict[int, Tensor], device: torch.device) -> None:
    """Do the steps; `tensors` has those that come in by their numbers, and afterwards all others too."""
    for step in steps:
        if isinstance(step, Alloc):
            made = torch.empty_strided(step.size, step.stride, dtype=step.dtype, device=device)
            tensors[step.number] = made
        elif isinstance(step, Launch):
            args = filled(step.args, tensors)
            with in_role():  # what changes of the arguments is a step of its own
                step.specialised.launch(step.specialised.anchor(args), step.configuration, args)
        elif isinstance(step, Bump):
            torch.autograd.graph.increment_version(tensors[step.number])
        else:
            found = step.function(*filled(step.args, tensors), **filled(step.kwargs, tensors))
            results = zip(step.results, (found,) if step.single else found)
            tensors |= {number: one for number, one in results if number is not None}
