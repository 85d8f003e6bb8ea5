"""A Llama on several devices, by FSDP2 and by tensor parallelism, as it is and after swap: losses, collectives, times.

    torchrun --nproc-per-node 2 tools/distributed.py --csv benchmarks/results/h200x2_distributed.csv
    torchrun --nproc-per-node 2 tools/distributed.py --tiny       # on the CPU, to see that it runs

Every way starts from the same parameters and sees the same tokens, so that after each step the losses are those of one
device, but for the rounding of the half type. Under FSDP2 each device has its share of the rows of a batch; under tensor
parallelism each has all rows, and its share of heads and of the width of the MLPs.
"""

from __future__ import annotations

import copy
import csv
import gc
import itertools
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import cupyops
import cupyops.optim

LARGE = dict(
    hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8
)
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SPLIT: dict[str, Any] = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip
WAYS = ("one device", "FSDP2", "tensor parallel")
COLUMNS = ("way", "model", "ms", "peak_gib", "collectives", "losses")


def llama(tiny: bool, device: str) -> nn.Module:
    """The model that all start from, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = TINY if tiny else LARGE
    config = LlamaConfig(
        **sizes, vocab_size=256 if tiny else 32000, max_position_embeddings=4096, use_cache=False, attn_implementation="sdpa"
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


def placed(model: nn.Module, way: str, swapped: bool, mesh: DeviceMesh) -> nn.Module:
    """It, divided among the devices."""
    if swapped:
        cupyops.swap(model)
    if way == "tensor parallel":
        for layer in model.model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh, {name: style() for name, style in SPLIT.items()})
    if way == "FSDP2":
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def measured(
    model: nn.Module, batches: list[Tensor], way: str, swapped: bool, mesh: DeviceMesh, steps: int
) -> dict[str, Any]:
    """The row of a way: each step alike, the losses of the first ones."""
    device = batches[0].device
    mine = [b.chunk(mesh.size())[mesh.get_local_rank()] if way == "FSDP2" else b for b in batches]
    library: Any = cupyops.optim if swapped else torch.optim
    options: dict[str, Any] = {} if swapped or device.type == "cpu" else {"fused": True}
    groups: list[list[nn.Parameter]] = [[], []]  # torch.optim's kernel takes no DTensors beside other tensors
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    optimizer = library.AdamW([{"params": group} for group in groups if group], lr=1e-4, **options)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach().float()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    losses = []
    for tokens in mine[:4]:
        loss = step(tokens)
        if way == "FSDP2":
            dist.all_reduce(loss)
            loss /= mesh.size()
        losses.append(loss.item())
    with CommDebugMode() as found:
        step(mine[0])
    counts = {str(name).rpartition(".")[2]: count for name, count in found.get_comm_counts().items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        for tokens in mine[:2]:
            step(tokens)
        wait()
        times.append((time.perf_counter() - start) / 2 * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "way": way, "model": "swap" if swapped else "as it is", "ms": f"{statistics.median(times):.2f}",
        "peak_gib": f"{peak:.2f}", "collectives": " ".join(f"{n} {c}" for n, c in sorted(counts.items())),
        "losses": " ".join(f"{loss:.4f}" for loss in losses),
    }  # fmt: skip


def main(
    table: Annotated[Path | None, typer.Option("--csv", help="Write the rows there too.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small, on the CPU: nothing is measured.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Pairs of steps that are timed.")] = 6,
) -> None:
    """What the head of the file says."""
    warnings.filterwarnings("ignore")  # of CommDebugMode's hooks, for each of them
    device = "cpu" if tiny else "cuda"
    if not tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if tiny else "nccl")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    rows, context, steps = (2 * mesh.size(), 16, 1) if tiny else (rows, context, steps)
    source = torch.Generator().manual_seed(1)
    first = llama(tiny, "cpu")
    batches = [torch.randint(0, 256, (rows, context), generator=source).to(device) for _ in range(4)]
    found = []
    for way, swapped in itertools.product(WAYS, (False, True)):
        row = measured(placed(copy.deepcopy(first).to(device), way, swapped, mesh), batches, way, swapped, mesh, steps)
        found.append(row)
        if dist.get_rank() == 0:
            print(*row.values(), sep="  ", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if table is not None and dist.get_rank() == 0:
        gpu = "none" if tiny else f"{torch.cuda.get_device_name()} x {mesh.size()}"
        with table.open("w", newline="", encoding="utf-8") as file:
            file.write(f"# gpu: {gpu}\n# torch: {torch.__version__}\n# {rows} x {context} tokens in a step, bfloat16\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
