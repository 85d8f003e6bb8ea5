"""Training on several devices: losses, collectives and times, as the model is, after swap, and compiled by cupyops.

    torchrun --nproc-per-node 2 tools/distributed.py --csv benchmarks/results/h200x2_distributed.csv
    torchrun --nproc-per-node 2 tools/distributed.py --tiny       # on the CPU, to see that it runs

Every way starts from the same parameters and sees the same tokens, so that after each step the losses are those of one
device, but for the rounding of the half type. Under FSDP2 and DistributedDataParallel each device has its share of the rows
of a batch; under tensor parallelism each has all rows, and its share of heads and of the width of the MLPs.

- A Llama on one device, by FSDP2 and by tensor parallelism.
- The same by FSDP2 with two batches to a step and clipped gradients; then it is saved, and goes on there and on one device.
- A ResNet-50 by DistributedDataParallel with gradients in several buckets.
- The loss of logits of which each device has a part of the vocabulary, beside PyTorch's loss_parallel.
"""

from __future__ import annotations

import copy
import csv
import gc
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import typer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cupyops
import cupyops.nn.utils
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
ONE, FSDP, TENSOR = WAYS = ("one device", "FSDP2", "tensor parallel")
DATA = "DistributedDataParallel, ResNet-50"
PLAIN, SWAP, COMPILED = MODELS = ("as it is", "swap", 'compiled, backend="cupyops"')
COLUMNS = ("way", "model", "ms", "peak_gib", "collectives", "losses")
Row = dict[str, Any]


def llama(tiny: bool) -> nn.Module:
    """The language model that all start from, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = TINY if tiny else LARGE
    config = LlamaConfig(
        **sizes, vocab_size=256 if tiny else 32000, max_position_embeddings=4096, use_cache=False, attn_implementation="sdpa"
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


def resnet(tiny: bool) -> nn.Module:
    """The image model that all start from, in float32."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]) if tiny else {}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10 if tiny else 1000))


def placed(model: nn.Module, way: str, kind: str, mesh: DeviceMesh) -> nn.Module:
    """It, divided among the devices; what is compiled is each layer, so that FSDP2 can gather the next one meanwhile."""
    if kind == SWAP:
        cupyops.swap(model)
    if way == DATA:
        if kind == COMPILED:
            model.compile(backend="cupyops")
        return DistributedDataParallel(model, bucket_cap_mb=5)
    layers = model.model.layers  # type: ignore[union-attr]
    for layer in layers:  # type: ignore[union-attr]
        if way == TENSOR:
            parallelize_module(layer, mesh, {name: style() for name, style in SPLIT.items()})
        if kind == COMPILED:
            layer.compile(backend="cupyops")
        if way == FSDP:
            fully_shard(layer, mesh=mesh)
    if way == FSDP:
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module, kind: str, device: torch.device) -> Any:
    """AdamW of cupyops for what was swapped, else of PyTorch."""
    groups: list[list[nn.Parameter]] = [[], []]  # torch.optim's kernel takes no DTensors beside other tensors
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    options: dict[str, Any] = {} if kind == SWAP or device.type == "cpu" else {"fused": True}
    library: Any = cupyops.optim if kind == SWAP else torch.optim
    return library.AdamW([{"params": group} for group in groups if group], lr=1e-4, **options)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Its loss for tokens, or for images and their labels."""
    if len(batch) == 1:
        found: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
        return found
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        logits = model(batch[0]).logits
    return nn.functional.cross_entropy(logits.float(), batch[1])


def mean(loss: Tensor, way: str, mesh: DeviceMesh) -> float:
    """The loss of a whole batch, of which each device may have seen its share."""
    loss = loss.detach().float()
    if way in (FSDP, DATA):
        dist.all_reduce(loss)
        loss /= mesh.size()
    return loss.item()


def share(batches: list[tuple[Tensor, ...]], way: str, mesh: DeviceMesh) -> list[tuple[Tensor, ...]]:
    """Return the part of each batch that this device sees."""
    if way not in (FSDP, DATA):
        return batches
    return [tuple(one.chunk(mesh.size())[mesh.get_local_rank()] for one in batch) for batch in batches]


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def counted(call: Callable[[], Any]) -> str:
    """The collectives of a call by PyTorch's profiler, with their numbers."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
        wait()
    names = [event.name.partition(":")[2] for event in found.events() if event.name.startswith(("nccl:", "gloo:"))]
    return " ".join(f"{name.strip('_')} {count}" for name, count in sorted(Counter(names).items()))


def measured(
    model: nn.Module, batches: list[tuple[Tensor, ...]], way: str, kind: str, mesh: DeviceMesh, steps: int
) -> Row:
    """The row of a way: each step alike, the losses of the first ones."""
    device, mine = batches[0][0].device, share(batches, way, mesh)
    optimizer = optimizer_of(model, kind, device)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    losses = [mean(step(batch), way, mesh) for batch in mine[:4]]
    collectives = counted(lambda: step(mine[0]))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        wait()
        start = time.perf_counter()
        for batch in mine[:2]:
            step(batch)
        wait()
        times.append((time.perf_counter() - start) / 2 * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return row(way, kind, losses, ms=f"{statistics.median(times):.2f}", peak_gib=f"{peak:.2f}", collectives=collectives)


def row(way: str, kind: str, losses: list[float], **others: str) -> Row:
    return {
        **dict.fromkeys(COLUMNS, ""),
        "way": way,
        "model": kind,
        **others,
        "losses": " ".join(f"{x:.4f}" for x in losses),
    }


def resumed(first: nn.Module, batches: list[tuple[Tensor, ...]], kind: str, mesh: DeviceMesh) -> list[Row]:
    """FSDP2 with two batches to a step and clipped gradients, saved; then two more steps there, and on one device."""
    device, clip = batches[0][0].device, cupyops.nn.utils if kind == SWAP else nn.utils

    def fresh(way: str) -> tuple[nn.Module, Any]:
        model = placed(copy.deepcopy(first).to(device), way, kind, mesh)
        return model, optimizer_of(model, kind, device)

    def step(model: Any, optimizer: Any, way: str, pair: list[tuple[Tensor, ...]]) -> float:
        mine, losses = share(pair, way, mesh), []
        for batch in mine:
            if way == FSDP:
                model.set_requires_gradient_sync(batch is mine[-1])
            loss = loss_of(model, batch) / len(mine)
            loss.backward()
            losses.append(mean(loss, way, mesh))
        clip.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses)

    def states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    pairs = [batches[:2], batches[2:]]
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    model, optimizer = fresh(FSDP)
    found = [
        row(f"{FSDP}, two batches to a step, clipped", kind, [step(model, optimizer, FSDP, pair) for pair in pairs])
    ]
    checkpoint.save(states(model, optimizer), checkpoint_id=shared[0])
    found.append(row("the same, two more steps", kind, [step(model, optimizer, FSDP, pair) for pair in pairs]))
    model, optimizer = fresh(ONE)
    kept = states(model, optimizer)
    checkpoint.load(kept, checkpoint_id=shared[0])
    set_model_state_dict(model, kept["model"])
    set_optimizer_state_dict(model, optimizer, kept["optimizer"])
    found.append(
        row("these on one device, from the checkpoint", kind, [step(model, optimizer, ONE, pair) for pair in pairs])
    )
    return found


def vocabulary(tiny: bool, device: str, mesh: DeviceMesh) -> list[Row]:
    """The loss of logits that are split by vocabulary; its gradient is compared with that of whole logits."""
    source = torch.Generator().manual_seed(2)
    size = (64, 256) if tiny else (8192, 32000)
    logits = torch.randn(size, generator=source).to(device)
    target = torch.randint(0, size[1], size[:1], generator=source).to(device)
    whole = logits.clone().requires_grad_()
    nn.functional.cross_entropy(whole, target).backward()
    found = []
    for kind, function in (("torch, loss_parallel", nn.functional.cross_entropy), ("cupyops", cupyops.cross_entropy)):
        split = distribute_tensor(logits, mesh, [Shard(1)]).detach().requires_grad_()
        labels = distribute_tensor(target, mesh, [Replicate()]) if function is cupyops.cross_entropy else target

        def both(function: Any = function, split: Tensor = split, labels: Tensor = labels) -> Any:
            loss = function(split, labels)
            loss.backward()
            return loss

        with loss_parallel():
            loss = both()
            grad: Any = split.grad
            split.grad = None
            collectives = counted(both)
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        torch.testing.assert_close(grad.full_tensor(), whole.grad)
        found.append(row("loss over a vocabulary in parts", kind, [value.item()], collectives=collectives))
    return found


def main(
    table: Annotated[Path | None, typer.Option("--csv", help="Write the rows there too.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small, on the CPU: nothing is measured.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    context: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 2048,
    only: Annotated[
        str, typer.Option(help="Of llama, resumed, resnet, vocabulary.")
    ] = "llama,resumed,resnet,vocabulary",
    images: Annotated[int, typer.Option(min=2, help="Images of a batch.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Pairs of steps that are timed.")] = 6,
) -> None:
    """What the head of the file says."""
    warnings.filterwarnings("ignore")  # of the profiler and of checkpoints, in each process
    device = "cpu" if tiny else "cuda"
    if not tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if tiny else "nccl")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    rows, context, images, steps = (2 * mesh.size(), 16, 4, 1) if tiny else (rows, context, images, steps)
    source = torch.Generator().manual_seed(1)
    tokens: list[tuple[Tensor, ...]] = [
        (torch.randint(0, 256, (rows, context), generator=source).to(device),) for _ in range(4)
    ]
    side = 32 if tiny else 224
    pixels = [(torch.randn(images, 3, side, side, generator=source), torch.arange(images) % 10) for _ in range(4)]
    found: list[Row] = []

    def told(rows: list[Row]) -> None:
        found.extend(rows)
        if dist.get_rank() == 0:
            print(*("  ".join(row.values()) for row in rows), sep="\n", flush=True)
        gc.collect()
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()

    first = llama(tiny)
    for way, kind in itertools.product(WAYS if "llama" in only else (), MODELS):
        told([measured(placed(copy.deepcopy(first).to(device), way, kind, mesh), tokens, way, kind, mesh, steps)])
    for kind in MODELS if "resumed" in only else ():
        told(resumed(first, tokens, kind, mesh))
    batches: list[tuple[Tensor, ...]] = [tuple(one.to(device) for one in pair) for pair in pixels]
    for kind in MODELS if "resnet" in only else ():
        model = placed(resnet(tiny).to(device).to(memory_format=torch.channels_last), DATA, kind, mesh)  # type: ignore[call-overload]
        told([measured(model, batches, DATA, kind, mesh, steps)])
    if "vocabulary" in only:
        told(vocabulary(tiny, device, mesh))
    if table is not None and dist.get_rank() == 0:
        gpu = "none" if tiny else f"{torch.cuda.get_device_name()} x {mesh.size()}"
        about = f"{rows} x {context} tokens in a step of the Llama, {images} images in one of the ResNet-50; bfloat16"
        with table.open("w", newline="", encoding="utf-8") as file:
            file.write(f"# gpu: {gpu}\n# torch: {torch.__version__}\n# {about}\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
