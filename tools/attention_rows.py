"""Attention by width, kind and length beside cuDNN and PyTorch's flash attention, forward and backward, on a GPU.

`python tools/attention_rows.py` writes benchmarks/results/h100_attention_rows.csv as it goes, some two minutes for 100 rows,
and prints their geometric means; `--seconds 60` ends earlier. 16,384 tokens of 2,048 elements, bf16. `ours` is what a call
takes, PyTorch's own function where that is measured as faster; `kernels` are ours all the same. What PyTorch has no fused
function for is beside the next that it has: `apart`, packed sequences one by one, and `mask`, a window as a mask in memory.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyops
from cupyops.bench.timing import Clock, GpuClock, interleaved

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h100_attention_rows.csv"
TOKENS, WINDOW = 16384, 1023
WIDTHS = {128: (128, 16), 64: (64, 32), 256: (256, 8), 192: (128, 16), 96: (96, 16)}  # of v, and how many heads
KINDS = ("causal", "full", "gqa", "packed", "window")
LENGTHS = (4096, 1024, 16384, 512)  # those that tell most first
PEERS = ("cuDNN", "flash", "apart", "mask")
WAYS = ("forward", "backward")
COLUMNS = ("width", "value_width", "kind", "rows", "way", "gflop", "ours", "kernels", *PEERS, "ratio")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Row:
    """What is measured: calls of q, k and v, by name, and the flops of their forward."""

    width: int
    kind: str
    rows: int
    given: tuple[Tensor, ...]
    calls: dict[str, Call]
    flops: float

    @staticmethod
    def of(
        width: int, kind: str, rows: int, device: str = "cuda", tokens: int = TOKENS, heads: int | None = None
    ) -> Row:
        """Of 16,384 tokens, or as many as a sequence has; packed ones have from half to one and a half of `rows`."""
        value_width, usual = WIDTHS[width]
        heads = usual if heads is None else heads
        kv_heads, batch = heads // 4 if kind == "gqa" else heads, max(1, tokens // rows)
        options: dict[str, Any] = {} if kind == "full" else {"causal": "top_left"}
        counts = (heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)
        torch.manual_seed(rows + width)
        if kind == "packed":
            draw = random.Random(rows)
            lengths = [draw.randint(rows // 2, rows + rows // 2) for _ in range(max(2, batch))]
            ends = [0, *itertools.accumulate(lengths)]
            starts = torch.tensor(ends, dtype=torch.int32, device=device)
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))
            given = tuple(torch.randn(ends[-1], n, w, device=device).bfloat16() for n, w in counts)
            pairs = sum(n * (n + 1) / 2 for n in lengths)
            peers = _of_packed(ends, starts, max(lengths), width == value_width)
        else:
            given = tuple(torch.randn(batch, rows, n, w, device=device).bfloat16().transpose(1, 2) for n, w in counts)
            seen = rows * rows if kind == "full" else rows * (rows + 1) / 2
            if kind == "window" and rows > WINDOW + 1:
                seen = (WINDOW + 1) * (rows - WINDOW - 1) + (WINDOW + 1) * (WINDOW + 2) / 2
            pairs = batch * seen
            peers = _of_window(rows, width == value_width, device) if kind == "window" else _of_backends(kind)
        if kind == "window":
            options["window"] = (WINDOW, 0)
        function: Callable[..., Any] = cupyops.attention
        if kind in ("full", "causal", "gqa"):  # which PyTorch's signature has
            function = cupyops.scaled_dot_product_attention
            options = {"is_causal": kind != "full", "enable_gqa": kind == "gqa"}
        ours = functools.partial(function, **options)
        return Row(width, kind, rows, given, {"ours": ours, **peers}, 2.0 * heads * pairs * (width + value_width))

    def measured(self, clock: Clock, seconds: float) -> dict[str, dict[str, float]]:
        """way -> name -> us; each in turn with the others, and then our kernels alone, which are a setting."""
        q, k, v, grad = self.given
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]

        def backward(call: Call) -> Callable[[], Any]:
            y = call(*wanted)
            return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)

        def forward(call: Call) -> Callable[[], Any]:
            return torch.no_grad()(lambda: call(q, k, v))

        found = {}
        for way, begun in (("forward", forward), ("backward", backward)):
            found[way] = _times(begun, self.calls, clock, seconds)
            with cupyops.never_slower(False):
                found[way] |= _times(begun, {"kernels": self.calls["ours"]}, clock, seconds / 2)
        return found


def _times(
    begun: Callable[[Call], Callable[[], Any]], calls: dict[str, Call], clock: Clock, seconds: float
) -> dict[str, float]:
    """Medians of those that there are, each after calls that compile and record it."""
    runs = {}
    for name, call in calls.items():
        try:
            run = begun(call)
            for _ in range(3):
                run()
            runs[name] = run
        except RuntimeError as error:  # a backend that does not serve this
            if name in ("ours", "kernels") or "CUDA error" in str(error):
                raise
    times = interleaved({name: _sampled(run) for name, run in runs.items()}, clock, seconds)
    return {name: time["us"].median for name, time in times.items()}


def _sampled(run: Callable[[], Any]) -> Callable[[Clock], dict[str, float]]:
    return lambda clock: {"us": clock.sample(lambda _: run())}


def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int, left: int | None, right: int | None
) -> Tensor:
    """PyTorch's flash attention, causal, of packed sequences, or within a window, which no public function of 2.11 has."""
    sides = {"window_size_left": left, "window_size_right": right}
    call = torch.ops.aten._flash_attention_forward
    found: Tensor = call(q, k, v, starts, starts, longest, longest, 0.0, True, False, **sides)[0]
    return found


def _of_packed(ends: Sequence[int], starts: Tensor, longest: int, alike: bool) -> dict[str, Call]:
    def apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for i, j in itertools.pairwise(ends):
            one, keys, values = (x[i:j].transpose(0, 1)[None] for x in (q, k, v))
            found.append(scaled_dot_product_attention(one, keys, values, is_causal=True)[0].transpose(0, 1))
        return torch.cat(found)

    if alike:
        return {"flash": lambda q, k, v: _flash(q, k, v, starts, longest, None, None)}
    return {"apart": apart}


def _of_window(rows: int, alike: bool, device: str) -> dict[str, Call]:
    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _flash(q, k, v, None, rows, WINDOW, 0).transpose(1, 2)

    if alike:
        return {"flash": flash}
    apart = torch.arange(rows, device=device)[:, None] - torch.arange(rows, device=device)
    seen = (apart >= 0) & (apart <= WINDOW)
    return {"mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, seen)}


def _of_backends(kind: str) -> dict[str, Call]:
    def by(backend: SDPBackend) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=kind != "full", enable_gqa=kind == "gqa")

        return call

    return {"cuDNN": by(SDPBackend.CUDNN_ATTENTION), "flash": by(SDPBackend.FLASH_ATTENTION)}


def line(row: Row, way: str, times: dict[str, float]) -> dict[str, Any]:
    """Of the file: microseconds, and how many times as fast ours is as the fastest of the others."""
    flops = row.flops * (1 if way == "forward" else 2.5)
    peers = [times[name] for name in PEERS if name in times]
    found = {"width": row.width, "value_width": WIDTHS[row.width][0], "kind": row.kind, "rows": row.rows, "way": way}
    figures = {name: f"{us:.4g}" for name, us in times.items()}
    ratio = f"{min(peers) / times['ours']:.3f}" if peers else ""
    return {**found, "gflop": f"{flops / 1e9:.4g}", **figures, "ratio": ratio}


def read(path: Path = FILE) -> list[dict[str, str]]:
    """The lines of a file."""
    with path.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def mean(lines: Sequence[dict[str, Any]], **wanted: Any) -> float:
    """The geometric mean of the ratios of lines of that width, kind, way; nan where there are none."""
    chosen = [
        one for one in lines if one["ratio"] and all(str(one[key]) == str(value) for key, value in wanted.items())
    ]
    return math.exp(sum(math.log(float(one["ratio"])) for one in chosen) / len(chosen)) if chosen else math.nan


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """The means, and which rows from 1,024 on are behind."""
    said = []
    for way in WAYS:
        of = [one for one in lines if one["way"] == way and one["ratio"]]
        keys = [*(("width", width) for width in WIDTHS), *(("kind", kind) for kind in KINDS)]
        parts = ", ".join(f"{key} {mean(of, **{name: key}):.3f}" for name, key in keys)
        under = [one for one in of if float(one["ratio"]) < 0.95 and int(one["rows"]) >= 1024]
        names = [f"{one['width']} {one['kind']} {one['rows']} {one['ratio']}" for one in under]
        said.append(f"{way}: {mean(of):.3f} over {len(of)} rows; {parts}; under 0.95: {'; '.join(names) or 'none'}")
    return "\n".join(said)


def order() -> Iterator[tuple[int, str, int]]:
    """(width, kind, rows), those that tell most first."""
    for rows, width, kind in itertools.product(LENGTHS, WIDTHS, KINDS):
        yield width, kind, rows


def run(
    path: Path, seconds: float, each: float, rows: Sequence[tuple[int, str, int]], seen: Callable[[str], None]
) -> None:
    """Measure rows into a file, until so many seconds have gone by; `seen` gets a line of text for each."""
    end, clock, lines = time.monotonic() + seconds, GpuClock(), []
    with path.open("w", newline="") as file:
        card, torch_version = torch.cuda.get_device_name(), torch.__version__
        file.write(f"# {card}, torch {torch_version}, cuDNN {torch.backends.cudnn.version()}; microseconds\n")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for width, kind, length in rows:
            if time.monotonic() > end:
                seen(f"out of time: {width} {kind} {length}")
                continue
            row, text = Row.of(width, kind, length), f"{width:3d} {kind:6s} {length:5d}"
            for way, times in row.measured(clock, each).items():
                lines.append(line(row, way, times))
                writer.writerow(lines[-1])
                rates = " ".join(f"{name} {float(lines[-1]['gflop']) / us * 1e3:.0f}" for name, us in times.items())
                text += f" | {way} {lines[-1]['ratio']} {rates}"
            file.flush()
            seen(text)
    seen(summary(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--each", type=float, default=0.05, help="of a row and a way, at least nine samples")
    given = parser.parse_args(arguments)
    run(given.file, given.seconds, given.each, list(order()), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
