"""Small calls of every operator: each kernel of cuda_src, several blocks, tails, vectors and single elements.

An operator whose contract in tests/ops reaches its kernels needs no line here: its calls are the samples of that contract.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cupyops
from cupyops._dispatch import (
    epilogues,
    few_rows,
    few_rows_layers,
    gemm,
    grouped,
    linear_loss_parts,
    pointwise_fused,
    rows,
    scaled,
    wgmma,
)
from cupyops._dispatch.forms import use_form
from cupyops._dispatch.gpu import gpu
from cupyops._dispatch.image_blocks import Side, blocks_of
from cupyops._kernel.compile.source import cuda_src
from cupyops.ops._group_norm import group_norm_alike
from cupyops.ops._relu import MASKED
from cupyops.testing import assume_gpu

_A_CARD = {"multiprocessors": 132, "shared": 232448}  # that every GEMM is planned for, whatever runs it
_BY_MMA = {panel: ("attention.forward:mma", f"attention.backward:mma_{panel}") for panel in (32, 64)}
_IN_ONE_PASS = {
    engine: (f"attention.forward:{engine}", f"attention.backward:{engine}_once") for engine in ("mma", "wgmma")
}
_GEMMS = {cupyops.matmul: "matmul", cupyops.linear: "linear", cupyops.conv2d: "conv2d"}
_GEMMS[cupyops.linear_act] = "linear_act"

Call = Callable[["Make"], Any]


class Make:
    """Gives the tensors of a sample, the same for the same seed, and remembers them."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0, runs_on: str | None = None) -> None:
        """`runs_on`: the device that the sample runs on, where its tensors are copied there."""
        self.dtype, self.device = dtype, device
        self._runs_on = torch.device(runs_on or device)
        self.made: list[Tensor] = []
        self._rng = np.random.default_rng(seed)

    @property
    def width(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def half(self) -> tuple[()] | bool:
        """True for a 16-bit dtype, else no sample."""
        return self.dtype.itemsize == 2 or ()

    @property
    def hopper(self) -> tuple[()] | bool:
        """True where there are kernels of half types for Hopper alone, else no sample."""
        return self.half and self.on_hopper

    @property
    def on_hopper(self) -> tuple[()] | bool:
        """True where the sample runs on Hopper, else no sample."""
        return gpu(self._runs_on).capability == 9 or ()

    @property
    def narrow(self) -> tuple[()] | bool:
        """True for a dtype of at most 32 bits, else no sample."""
        return self.dtype.itemsize <= 4 or ()

    def __call__(self, *shape: int) -> Tensor:
        """Normal values that want a gradient."""
        return self._given(self._normal(shape, self.dtype)).requires_grad_()

    def integers(self, *shape: int, high: int) -> Tensor:
        """int64 values in [0, high)."""
        return self._given(torch.from_numpy(np.array(self._rng.integers(0, high, shape))))

    def targets(self, rows: int, classes: int) -> Tensor:
        """Classes of rows, every third of which, and the last, is to be ignored."""
        value = self._rng.integers(0, classes, rows)
        value[::3] = value[-1] = -100
        return self._given(torch.from_numpy(value))

    def probabilities(self, *shape: int) -> Tensor:
        """Positive numbers that sum to about one along dimension 1."""
        value = self._rng.integers(0, 1 << 11, shape) / (1 << 10) / shape[1]
        return self._given(torch.from_numpy(value).to(self.dtype)).requires_grad_()

    def like(self, tensor: Tensor) -> Tensor:
        """A gradient for `tensor`."""
        return self._given(self._normal(tuple(tensor.shape), tensor.dtype))

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(self._rng.standard_normal(shape))).to(dtype)

    def _given(self, value: Tensor) -> Tensor:
        self.made.append(value)
        return value.detach().clone().to(self.device)


def run(call: Call, make: Make) -> list[Tensor]:
    """The outputs, then the gradient of each input that wants one; nothing of a sample that is not of this dtype."""
    sample = call(make)
    if not sample:
        return []
    function, *arguments = sample
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    with (
        cupyops.use_form(*keywords.pop("forms", ())),
        cupyops.testing.assume_gpu(**keywords.pop("gpu", {})),
        _planned(_GEMMS.get(function), keywords.pop("tile", 0), make.dtype),
        _at_most(keywords.pop("blocks", 0)),
        _scratch(keywords.pop("scratch", 0)),
    ):
        return _run(function, arguments, keywords, make)


def _run(function: Any, arguments: list[Any], keywords: dict[str, Any], make: Make) -> list[Tensor]:
    if isinstance(function, type):
        return _steps(function, arguments, keywords, make)
    result = function(*arguments, **keywords)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    leaves = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(outputs[0], leaves, make.like(outputs[0])) if leaves else ()
    return [x.detach() for x in (*outputs, *gradients)]


def _steps(optimizer: Any, parameters: list[Any], keywords: dict[str, Any], make: Make) -> list[Tensor]:
    """Two steps of an optimizer; the parameters, then the state, then the gradients as it left them."""
    scale = keywords.pop("grad_scale", None)
    made = optimizer(parameters, **keywords)
    if scale is not None:  # as torch.amp.GradScaler sets it
        made.grad_scale = torch.full((), scale, device=make.device)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = make.like(parameter)
        made.step()
    kept = [one for state in made.state.values() for one in state.values() if one is not None]
    return [x.detach() for x in (*parameters, *kept, *(parameter.grad for parameter in parameters))]


def _clipped(*gradients: Tensor, max_norm: float, norm_type: float) -> list[Tensor]:
    """The norm, then the gradients as they are left."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.detach()
    norm = cupyops.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    return [norm, *(gradient.detach() for gradient in gradients)]


@contextlib.contextmanager
def _planned(operator: str | None, tile: int, dtype: torch.dtype) -> Iterator[None]:
    """GEMMs as planned for one card; with a tile, by blocks of that tile where there is one for the dtype."""
    if operator is None:
        yield
        return
    engine = "mma" if dtype in gemm.HALF else "fma"
    asked = [f"{operator}:{engine}_{tile}"] if tile in gemm.tiles_for(dtype, wide=True) else []
    with assume_gpu(**_A_CARD), use_form(*asked):
        yield


@contextlib.contextmanager
def _at_most(blocks: int) -> Iterator[None]:
    """Grids of so few blocks that each strides over several rows or tiles, where a grid has a limit, and those of the
    losses on the smallest of GPUs. 0: as always."""
    before = rows._MAX_GRID
    rows._MAX_GRID = blocks or before
    try:
        with assume_gpu(**({"multiprocessors": 1} if blocks else {})):
            yield
    finally:
        rows._MAX_GRID = before


@contextlib.contextmanager
def _scratch(size: int) -> Iterator[None]:
    """So many bytes for the logits of fused_linear_cross_entropy. 0: as always."""
    with assume_gpu(**({"scratch": size} if size else {})):
        yield


def samples() -> Iterator[tuple[str, Call]]:
    """(the operator, the call)."""
    for operator, calls in _SAMPLES.items():
        for call in calls:
            yield operator, call
    for operator in sorted(_operators() - set(_SAMPLES)):
        yield from _of_contract(operator)


@functools.cache
def _operators() -> frozenset[str]:
    """The names that tell operators apart: those of the table, and of the modules with a file of kernels of their name."""
    modules = (path.stem.removeprefix("_") for path in Path(cupyops.ops.__file__).parent.glob("_[!_]*.py"))
    return frozenset({*_SAMPLES, *(name for name in modules if (cuda_src() / f"{name}.cu").is_file())})


def _of_contract(operator: str) -> Iterator[tuple[str, Call]]:
    """The samples of an operator's contract."""
    for folder in ("tests", "tests/support"):
        if (path := str(Path(__file__).resolve().parents[1] / folder)) not in sys.path:
            sys.path.append(path)
    contract: Any = importlib.import_module("samples").contract(operator)
    made = importlib.import_module("contract").Make

    def call(index: int, make: Make) -> tuple[Any, ...]:
        sample = [*contract().samples(made("cpu", make.dtype))][index]
        sample = sample.map(lambda tensor: make._given(tensor.detach()).requires_grad_(tensor.requires_grad))
        return contract.function, *sample.args, dict(sample.kwargs)

    for index in range(len([*contract().samples(made("cpu", torch.float32))])):
        yield operator, partial(call, index)


def operator_of(file: str) -> str:
    """The operator whose kernels a .cu file has: the longest name with which the file's begins, as conv2d_direct.cu's."""
    stem = file.removesuffix(".cu")
    return max((name for name in _operators() if f"{stem}_".startswith(f"{name}_")), key=len, default=stem)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.detach().to(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_(tensor.requires_grad)


def _off(tensor: Tensor) -> Tensor:
    """The same values, one element past a 16-byte boundary."""
    flat = tensor.detach().flatten()
    return torch.cat([flat[:1], flat])[1:].view(tensor.shape).requires_grad_(tensor.requires_grad)


def _reductions(function: Any, other: Any) -> list[Call]:
    """Of all, of rows, of columns, and of what lies between, in vectors or not."""
    return [
        lambda m: (function, m(7, 130)),
        lambda m: (other, m(5, 133), 1),
        lambda m: (function, m(40, 24), 0),
        lambda m: (function, m(3, 5, 16), (0, 2)),
        lambda m: (function, m(3, 5, 7), (0, 2)),
        lambda m: (other, m(17000, 2), 0),
        lambda m: (function, m(20, 7), 0),
        lambda m: (function, m(3, 2), 0),
        lambda m: (function, m(3, 7, 5), 1),
    ]


def _by_threads(name: str, function: Any) -> list[Call]:
    """Reductions of rows that a thread has, in single elements and in vectors."""
    forms = {"forms": [f"{name}.forward:thread_per_row"]}
    return [
        lambda m: m.narrow and (function, m(300, 7), 1, {**forms}),
        lambda m: m.narrow and (function, m(300, 16), 1, {**forms}),
    ]


def _rows(function: Any) -> list[Call]:
    """Softmaxes: rows of few threads, of many, of a block, too long for one; columns, single and by twos."""
    return [
        lambda m: (function, m(37, 33), 1),
        lambda m: (function, m(40, 5), 1),
        lambda m: (function, m(3, 300), 1),
        lambda m: (function, m(5, 64), 1),
        lambda m: (function, m(1, 4096 * m.width + 8), 1),
        lambda m: (function, m(3, 40, 2), 1),
        lambda m: (function, m(300, 7), 0),
        lambda m: (function, m(70, 16), 0),
        lambda m: (function, m(37, 33), 1, {"blocks": 2}),
        lambda m: (function, m(5, 1031), 1, {"blocks": 2}),
        lambda m: (function, m(3, 2048 * m.width + 5), 1, {"blocks": 2}),
        lambda m: (function, m(60, 90), 0, {"blocks": 1}),
        lambda m: (function, m(37, 48), 0),
        lambda m: (function, m(3, 21, 16), 1, {"blocks": 1}),
        lambda m: (function, _off(m(21, 48)), 0),
        lambda m: (function, m(3, 40 * m.width), 1),
        *[lambda m, call=call: m.half and call(m) for call in _widened(function)],
    ]


def _widened(function: Any) -> list[Call]:
    """Softmaxes of half types that give float32, in each of those forms."""
    to = {"dtype": torch.float32}
    return [
        lambda m: (function, m(37, 33), 1, {**to}),
        lambda m: (function, m(3, 40 * m.width), 1, {**to}),
        lambda m: (function, m(3, 40 * m.width + 1), 1, {**to}),
        lambda m: (function, m(1, 4096 * m.width + 8), 1, {**to}),
        lambda m: (function, m(300, 7), 0, {**to}),
        lambda m: (function, m(37, 48), 0, {**to}),
    ]


def _layer_norm(m: Make, rows: int, size: int) -> tuple[Any, ...]:
    return cupyops.layer_norm, m(rows, size), (size,), m(size), m(size)


def _rms_norms(call: Callable[..., tuple[Any, ...]]) -> list[Call]:
    """call(m, rows, size, weight or None, options): rows held by few threads, by many, by a block, too long for one."""
    return [
        lambda m: call(m, 300, 33, m(33)),
        lambda m: call(m, 5, 300, None),
        lambda m: call(m, 3, 1024, m(1024)),
        lambda m: call(m, 1, 4096 * m.width + 8, m(4096 * m.width + 8)),
        lambda m: call(m, 300, 5, m(5)),
        lambda m: call(m, 3, 40 * m.width, m(40 * m.width)),
        lambda m: call(m, 5, 1031, m(1031), {"gpu": {"max_blocks": 2}}),
        lambda m: m.narrow and call(m, 9, 1032, m(1032), {"forms": ["norm:pipelined"]}),
    ]


def _batch_norm(m: Make, x: Tensor, training: bool) -> tuple[Any, ...]:
    channels = x.shape[1]
    running = m(channels).detach(), m(channels).detach().abs() + 0.5
    return cupyops.batch_norm, x, *running, m(channels), m(channels), training


def _batch_norm_act(m: Make, x: Tensor, training: bool, form: str = "") -> tuple[Any, ...]:
    _, *args = _batch_norm(m, x, training)
    residual = torch.empty_like(x).copy_(m(*x.shape)).detach().requires_grad_()
    forms = [f"batch_norm_act.{way}:{form}" for way in ("forward", "backward")] if form else []
    return cupyops.batch_norm_act, *args, {"residual": residual, "forms": forms}


def _linear_loss(m: Make, rows: int, size: int, classes: int, bias: Any = None, **options: Any) -> tuple[Any, ...]:
    function = cupyops.fused_linear_cross_entropy
    return function, m(rows, size), m(classes, size), m.targets(rows, classes), bias, options


def _loss_in_parts(m: Make) -> Any:
    """By wgmma, where no gradient is wanted."""
    if not m.hopper:
        return ()
    function, x, weight, target, bias, _ = _linear_loss(m, 136, 72, 553, m(553))
    options = {"gpu": _A_CARD, "forms": [f"fused_linear_cross_entropy.losses:{linear_loss_parts.LOSSES.list[0].name}"]}
    return function, x.detach(), weight.detach(), target, bias.detach(), {"label_smoothing": 0.1, **options}


def _beside(m: Make) -> Any:
    """A convolution of one tap with the moments of its result, and its gradient with what another reader gives."""
    if not m.hopper:
        return ()
    return (
        _with_moments,
        *(one.detach() for one in (_channels_last(m(9, 136, 8, 4)), m(264, 136, 1, 1))),
        {"gpu": _A_CARD},
    )


def _with_moments(x: Tensor, weight: Tensor) -> Tensor:
    shape = x.shape[0], weight.shape[0], *x.shape[2:]
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    grad_x, card, filters = torch.empty_like(x), gpu(x.device), weight.shape[0]
    moments, added = (forms.list[0] for forms in (pointwise_fused.MOMENTS, pointwise_fused.ADDED))
    found, _ = pointwise_fused.measure(
        moments.launch(pointwise_fused.problem_of(x, filters, False), card), x, weight, y
    )
    pointwise_fused.add(added.launch(pointwise_fused.problem_of(x, filters, True), card), y, weight, x, grad_x)
    return grad_x.sum() + found.sum()


def _in_blocks(m: Make, wide: bool) -> Any:
    """An image in blocks, of a half type or of float32, and results that are mended."""
    return m.half and (
        _mended,
        (m(2, 3, 16, 14).float() if wide else m(2, 3, 16, 14)).detach(),
        m(8, 16, 4, 4).detach(),
    )


def _mended(x: Tensor, filters: Tensor) -> Tensor:
    x = x.clone()
    x[0, 1, 5, 6] = float("inf")
    blocks = blocks_of(x, filters.dtype, Side.of(16, 7, 3), Side.of(14, 7, 3))
    filters = filters.to(memory_format=torch.channels_last)
    y = torch.nn.functional.conv2d(blocks.made.permute(0, 3, 1, 2), filters)
    y = y.to(memory_format=torch.channels_last)
    blocks.mend(filters, y)
    return y


def _of_halves(m: Make, way: str, **options: Any) -> Any:
    """A step on half types: whole chunks, a tensor that is not aligned, and one element."""
    return m.half and (cupyops.optim.AdamW, m(9000), _off(m(33)), m(1), {way: True, "lr": 0.1, **options})


def _attended(m: Make, heads: tuple[int, int], rows: tuple[int, int], width: int, **options: Any) -> tuple[Any, ...]:
    q, k, v = (m(1, heads[i], rows[i], width) for i in (0, 1, 1))
    return cupyops.attention, q, k, v, {"gpu": _A_CARD, **options}


def _packed(m: Make, lengths: tuple[int, ...], width: int) -> tuple[Any, ...]:
    """Sequences one after the other, with rows behind the last that are of none."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=m.device)
    q, k, v = (m(sum(lengths) + 5, heads, width) for heads in (2, 1, 1))
    sequences = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return cupyops.attention, q, k, v, {"gpu": _A_CARD, "causal": "top_left", **sequences}


def _decoded(m: Make, sizes: tuple[int, int, int, int], width: int, paged: int = 0, **options: Any) -> tuple[Any, ...]:
    queries, heads, kv_heads, rows = sizes
    q, (k, v) = m(2, queries, heads, width), (m(2, rows, kv_heads, width) for _ in range(2))
    lengths = torch.tensor([rows, rows // 2], dtype=torch.int32, device=m.device)
    if not paged:
        return cupyops.decode_attention, q, k, v, lengths, options
    k, v = (x.detach().reshape(-1, paged, kv_heads, width) for x in (k, v))
    table = torch.arange(len(k), dtype=torch.int32, device=m.device).flip(0).view(2, -1)
    return cupyops.decode_attention, q, k, v, lengths, table, options


def _unary(function: Any) -> list[Call]:
    """Elementwise: one element too many for a block, vectors alone, off a boundary."""
    return [
        lambda m: (function, m(3, 1027)),
        lambda m: (function, m(5)),
        lambda m: (function, m(4, 1024)),
        lambda m: (function, _off(m(2100))),
    ]


def _by_wgmma(m: Make, form: wgmma.Tile, layout: tuple[bool, bool]) -> Any:
    """A product by one form, of operands stored as one of its kernels takes them."""
    if not m.hopper:
        return ()
    k = 2 * wgmma.LEAST_SHARE if isinstance(form, wgmma.Splits) else 264
    a, b = m(136, k).detach(), m(k, 280).detach()
    a, b = a.T.contiguous().T if layout[0] else a, b if layout[1] else b.T.contiguous().T
    return cupyops.matmul, a, b, {"gpu": _A_CARD, "forms": [f"matmul:{form.name}"]}


def _activated(m: Make, activation: str) -> Any:
    """A linear layer with all that follows it, by wgmma."""
    if not m.hopper:
        return ()
    given = m(136, 264), m(280, 264), m(280), activation, m(136, 280)
    return cupyops.linear_act, *given, {"gpu": _A_CARD, "forms": [f"linear_act:{epilogues.ACTIVATED.name}"]}


def _few_rows(m: Make, rows: int) -> Any:
    """A linear layer with all that follows it, or a gated one, of few rows."""
    if not m.narrow:
        return ()
    if rows > 16:  # of which a gate alone has room on every card
        return cupyops.gated_linear, m(rows, 328), m(75, 328), m(75, 328), {"forms": ["gated_linear:few_rows"]}
    given = m(rows, 328), m(75, 328), m(75), "silu", m(rows, 75)
    return cupyops.linear_act, *given, {"forms": ["linear_act:few_rows"]}


def _normalised(m: Make) -> Any:
    """A gated layer behind an RMS norm, of few rows."""
    if m.dtype not in few_rows.NORMALISED:
        return ()
    given = m(5, 328), m(328), 1e-5, m(40, 328), m(40, 328), "silu"
    return few_rows_layers.gated_linear, *given, {"gpu": _A_CARD, "forms": ["gated_linear:few_rows"]}


def _gated(m: Make, activation: str) -> Any:
    """A gated layer, by wgmma."""
    if not m.hopper:
        return ()
    given = m(136, 264), m(152, 264), m(152, 264), activation
    return cupyops.gated_linear, *given, {"gpu": _A_CARD, "forms": [f"gated_linear:{epilogues.GATED.name}"]}


def _grouped(m: Make, ends: list[int], turned: bool) -> Any:
    """Rows of groups, some of which are of none."""
    if not m.hopper:
        return ()
    x, weight = m(200, 72), m(len(ends), *((264, 72) if turned else (72, 264)))
    offs = torch.tensor(ends, dtype=torch.int32, device=m.device)
    options = {"gpu": _A_CARD, "forms": [f"grouped_mm:{grouped.ROWS.list[0].name}"]}
    return cupyops.grouped_mm, x, weight.mT if turned else weight, {"offs": offs, **options}


def _scaled(m: Make, form: scaled.Scaled, types: tuple[torch.dtype, torch.dtype], fast: bool) -> Any:
    """Of bytes with scales for rows, with results in the dtype of `m`."""
    of_fp32 = m.dtype is torch.float32 or m.dtype is torch.float16 and types[0] is not types[1]
    if not (m.narrow and m.on_hopper) or of_fp32 and not form.of_fp32:
        return ()
    rows = min(form.m, 136) if form.split > 1 else 136
    a, b, bias = m(rows, 272).detach().to(types[0]), m(152, 272).detach().to(types[1]), m(152).detach()
    scales = (m(*shape).detach().float().abs() for shape in ((rows, 1), (1, 152)))
    options = {"gpu": _A_CARD, "forms": [f"scaled_mm:{form.name}"], "out_dtype": m.dtype, "use_fast_accum": fast}
    return cupyops.scaled_mm, a, b.T, *scales, bias, options


_SAMPLES: dict[str, list[Call]] = {
    "relu": [
        *_unary(cupyops.relu),
        lambda m: (cupyops.relu, m(MASKED + 3)),
        lambda m: (cupyops.relu, _off(m(MASKED + 3))),
    ],
    "silu": _unary(cupyops.silu),
    "gated": [
        lambda m: (cupyops.swiglu, m(3, 1027), m(3, 1027)),
        lambda m: (cupyops.swiglu, m(5, 66)),
        lambda m: (cupyops.swiglu, m(3, 1024)),
        lambda m: (cupyops.geglu, m(3, 1027), m(3, 1027)),
        lambda m: (cupyops.geglu, m(5, 64), {"approximate": "tanh"}),
    ],
    "gemm_wgmma": [  # where the GPU has it
        partial(_by_wgmma, form=form, layout=layout) for form in wgmma.FORMS for layout in form.layouts
    ],
    "attention": [  # by wgmma, where the GPU has it, then by mma
        lambda m: m.half and _attended(m, (2, 1), (70, 90), 64),
        lambda m: m.half and _attended(m, (1, 1), (140, 130), 128, causal="bottom_right"),
        lambda m: m.half and _attended(m, (2, 2), (130, 130), 40, window=(30, 20)),
        lambda m: m.half and _attended(m, (1, 1), (70, 70), 128, causal="top_left", forms=_BY_MMA[32]),
        lambda m: m.half and _attended(m, (2, 1), (70, 70), 64, window=(9, 4), forms=_BY_MMA[64]),
        lambda m: m.half and _attended(m, (2, 1), (70, 40), 200, causal="bottom_right"),
        lambda m: m.half and _attended(m, (2, 1), (70, 90), 64, softcap=2.0, mask="(q + k) % 3 != 0"),
        *[
            lambda m, width=width, more=more: (
                m.half and _attended(m, (2, 1), (140, 150), width, forms=_IN_ONE_PASS["mma"], **more)
            )
            for width, more in ((64, {"causal": "bottom_right"}), (96, {"window": (30, 20)}), (128, {}), (256, {}))
        ],
        *[
            lambda m, width=width, more=more: (
                m.hopper and _attended(m, (2, 1), (200, 260), width, forms=_IN_ONE_PASS["wgmma"], **more)
            )
            for width, more in ((64, {}), (128, {"causal": "bottom_right"}), (192, {"window": (30, 20)}))
        ],
        lambda m: m.half and _packed(m, (30, 0, 45), 64),
        lambda m: m.half and _attended(m, (2, 1), (70, 90), 64, sinks=m(2).float(), causal="bottom_right"),
        lambda m: m.half and _attended(m, (2, 1), (70, 90), 64, alibi_slopes=m(2).detach().float(), causal="top_left"),
    ],
    "decode_attention": [
        lambda m: m.narrow and _decoded(m, (1, 2, 1, 70), 64),
        lambda m: m.narrow and _decoded(m, (3, 6, 1, 50), 40, window=20, softcap=2.0),
        lambda m: m.narrow and _decoded(m, (1, 4, 2, 96), 128, paged=32),
        lambda m: m.narrow and _decoded(m, (1, 2, 2, 40), 256),
        lambda m: m.narrow and _decoded(m, (1, 1, 1, 1100), 64),
    ],
    "scale_shift": [
        lambda m: (cupyops.scale_shift, m(37, 24), m(24), m(24)),
        lambda m: (cupyops.scale_shift, m(530, 7), m(7), m(7)),
        lambda m: (cupyops.scale_shift, m(2, 3, 2, 5), m(3, 1, 1), m(3, 1, 1)),
        lambda m: (cupyops.scale_shift, m(2, 3, 20, 30), m(3, 1, 1), m(3, 1, 1)),
        lambda m: (cupyops.scale_shift, m(2, 3, 5, 7), m(3, 1, 1), m(3, 1, 1)),
        lambda m: (cupyops.scale_shift, m(900), m(), m()),
        lambda m: (cupyops.scale_shift, m(3, 4, 5), m(3, 1, 5), m(4, 5)),
    ],
    "column_finalize": [
        lambda m: (cupyops.scale_shift, m(3001, 8), m(8), m(8)),
        lambda m: (cupyops.bias_gelu, m(700, 37), m(37)),
    ],
    "loss_finalize": [
        lambda m: (cupyops.nll_loss, m(5000, 3), m.integers(5000, high=3)),
        lambda m: (cupyops.cross_entropy, m(300, 40), m.integers(300, high=40), {"reduction": "sum"}),
    ],
    "batch_norm": [
        lambda m: (
            m.narrow
            and (
                *_batch_norm(m, m(70, 5, 8, 8), True),
                {"forms": ["batch_norm.backward:nhwc_inline"]},
            )
        ),
        *[
            lambda m, shape=shape, training=training: _batch_norm(m, m(*shape), training)
            for shape in ((3, 5, 7, 9), (9, 2, 40, 64), (70, 13), (65, 24))
            for training in (True, False)
        ],
        lambda m: _batch_norm(m, _channels_last(m(3, 16, 5, 4)), True),
        lambda m: _batch_norm(m, _off(m(2, 3, 70)), True),
    ],
    "batch_norm_act": [
        lambda m: m.narrow and _batch_norm_act(m, m(9, 5, 8, 8), True, "nchw_two_pass"),
        lambda m: m.narrow and _batch_norm_act(m, _channels_last(m(9, 2 * m.width, 5, 4)), True, "nhwc_two_pass"),
        *[
            lambda m, shape=shape, training=training: _batch_norm_act(m, m(*shape), training)
            for shape in ((3, 5, 7, 8), (9, 2, 40, 64), (17, 8, 33), (70, 16), (1040, 64))
            for training in (True, False)
        ],
        lambda m: _batch_norm_act(m, _channels_last(m(3, 16, 5, 4)), True),
    ],
    "embedding": [
        lambda m: (cupyops.embedding, m.integers(40, high=3), m(5, 3), 1),
        lambda m: (cupyops.embedding, m.integers(3, 30, high=9), m(9, 2 * m.width), {"scale_grad_by_freq": True}),
        lambda m: (cupyops.embedding, m.integers(300, high=5), m(5, 40), 2, {"forms": ["embedding:sorted"]}),
    ],
    "group_norm": [
        lambda m: (cupyops.group_norm, m(3, 6, 5, 7), 3, m(6), m(6)),
        lambda m: (cupyops.group_norm, m(2, 8, 4, 8), 4, m(8), m(8)),
        lambda m: (cupyops.group_norm, m(40, 6), 3, m(6), m(6)),
        lambda m: (cupyops.group_norm, m(2, 4, 50 * m.width), 1, m(4), m(4)),
        lambda m: (cupyops.group_norm, m(1, 4, 300 * m.width), 1, m(4)),
        lambda m: (cupyops.group_norm, _off(m(2, 4, 300)), 2, m(4), m(4)),
        lambda m: (cupyops.group_norm, m(2, 3, 1100 * m.width + 1), 1, m(3), m(3)),
        lambda m: (cupyops.group_norm, m(300, 6, 7), 2, m(6), m(6)),
        lambda m: (cupyops.group_norm, m(5, 8, 7, 7), 2, m(8), m(8)),
        lambda m: (cupyops.group_norm, m(3, 2 * m.width, m.width + 1), 2, m(2 * m.width), m(2 * m.width)),
        lambda m: (cupyops.group_norm, m(2, m.width, 257), 1, m(m.width), m(m.width)),
        lambda m: (group_norm_alike, _channels_last(m(2, 16, 9, 8)), 2, m(16), m(16), 1e-5),
        lambda m: (group_norm_alike, _channels_last(m(1, 560, 23, 19)), 8, m(560), None, 1e-5),
    ],
    "norm": [
        lambda m: (cupyops.layer_norm, m(300, 33), (33,), m(33), m(33)),
        lambda m: (cupyops.layer_norm, m(9, 4, 64), (64,), m(64), m(64)),
        lambda m: (cupyops.layer_norm, m(5, 300), (300,), {"bias": m(300)}),
        lambda m: (cupyops.layer_norm, m(3, 1024), (1024,), m(1024)),
        lambda m: _layer_norm(m, 1, 4096 * m.width + 8),
        lambda m: (cupyops.layer_norm, m(300, 5), (5,), m(5), m(5)),
        lambda m: (cupyops.layer_norm, m(3, 40 * m.width), (40 * m.width,)),
        lambda m: (cupyops.layer_norm, m(3, 40 * m.width + 1), (40 * m.width + 1,)),
        lambda m: (cupyops.layer_norm, m(37, 33), (33,), m(33), m(33), {"gpu": {"max_blocks": 2}}),
        lambda m: (cupyops.layer_norm, m(5, 1031), (1031,), m(1031), m(1031), {"gpu": {"max_blocks": 2}}),
        lambda m: (*_layer_norm(m, 3, 2048 * m.width + 5), {"gpu": {"max_blocks": 2}}),
        *_rms_norms(lambda m, rows, size, *rest: (cupyops.rms_norm, m(rows, size), (size,), *rest)),
        *_rms_norms(lambda m, rows, size, *rest: (cupyops.add_rms_norm, m(rows, size), m(rows, size), (size,), *rest)),
    ],
    "rope": [
        lambda m: (cupyops.rope, m(2, 3, 37, 6), m(40, 3).detach(), m(40, 3).detach()),
        lambda m: (
            cupyops.rope,
            m(2, 21, 3, 48),
            m(30, 16).detach(),
            m(30, 16).detach(),
            m.integers(2, 21, high=30),
            {"seq_dim": 1},
        ),
        lambda m: (cupyops.rope, m(2, 21, 48), m(30, 16).detach(), m(30, 16).detach(), {"interleaved": True}),
        lambda m: (cupyops.rope, m(21, 6), m(30, 3).detach(), m(30, 3).detach(), {"interleaved": True}),
        lambda m: (
            m.narrow
            and (
                cupyops.rope,
                m(37, 8 * m.width),
                m(40, 4 * m.width).detach(),
                m(40, 4 * m.width).detach(),
                {"forms": ["rope:even"]},
            )
        ),
    ],
    "softmax": [*_rows(cupyops.softmax), *_rows(cupyops.log_softmax)],
    "gemm": [
        lambda m: (cupyops.matmul, m(70, 33), m(33, 129)),
        lambda m: (cupyops.matmul, m(3, 300), m(300, 5)),
        lambda m: (cupyops.matmul, m(16, 32), m(32, 24)),
        lambda m: (cupyops.matmul, m(2, 1, 3, 4, 5), m(1, 2, 1, 5, 2)),
        lambda m: (cupyops.matmul, _transposed(m(40, 72)), m(72, 40)),
        lambda m: (cupyops.matmul, m(136, 64), _transposed(m(64, 72))),
        lambda m: (cupyops.matmul, m(5, 520), m(520, 37), {"tile": 32}),
        lambda m: (cupyops.matmul, m(70, 40), m(40, 72), {"tile": 64}),
        lambda m: (cupyops.matmul, m(67, 75), m(75, 66), {"tile": 64}),
        lambda m: (cupyops.matmul, m(136, 72), m(72, 136), {"tile": 128}),
        lambda m: m.half and (cupyops.matmul, m(136, 136), m(136, 264), {"tile": gemm.WIDE}),
        lambda m: (cupyops.linear, m(70, 33), m(40, 33), m(40)),
        lambda m: (cupyops.linear, m(2, 3, 300), m(5, 300), m(5)),
        lambda m: (cupyops.linear, m(16, 32), m(24, 32)),
        lambda m: (cupyops.linear, m(72, 64), m(136, 64), m(136)),
        lambda m: (cupyops.linear, m(67, 75), m(66, 75), m(66), {"tile": 64}),
        lambda m: (cupyops.linear, m(136, 72), m(136, 72), m(136), {"tile": 128}),
        lambda m: m.half and (cupyops.linear, m(136, 136), m(264, 136), {"tile": gemm.WIDE}),
    ],
    "few_rows": [
        *[partial(_few_rows, rows=rows) for rows in (1, 4, 8, 16, 32, 64)],
        lambda m: (
            m.narrow and (cupyops.gated_linear, m(3, 72), m(40, 72), m(40, 72), {"forms": ["gated_linear:few_rows"]})
        ),
        _normalised,
    ],
    "linear_act": [
        lambda m: (cupyops.linear_act, m(70, 33), m(40, 33), m(40), "gelu", m(70, 40)),
        lambda m: (cupyops.linear_act, m(2, 3, 300), m(5, 300), m(5), "silu"),
        lambda m: (cupyops.linear_act, m(16, 32), m(24, 32), None, "none", m(16, 24)),
        lambda m: (cupyops.linear_act, m(72, 64), m(136, 64), m(136), "relu"),
        lambda m: (cupyops.linear_act, m(67, 75), m(66, 75), m(66), "gelu_tanh", m(67, 66), {"tile": 64}),
        lambda m: (cupyops.linear_act, m(136, 72), m(136, 72), m(136), "relu", m(136, 136), {"tile": 128}),
        lambda m: m.half and (cupyops.linear_act, m(136, 136), m(264, 136), {"tile": gemm.WIDE}),
        *[partial(_activated, activation=activation) for activation in epilogues.ACTIVATIONS],
    ],
    "gated_linear": [
        lambda m: (cupyops.gated_linear, m(70, 33), m(40, 33), m(40, 33)),
        lambda m: (cupyops.gated_linear, m(2, 3, 32), m(16, 32), None, "gelu"),
        *[partial(_gated, activation=activation) for activation in epilogues.GATES],
    ],
    "grouped_mm": [
        lambda m: _grouped(m, [130, 130, 170], turned=False),
        lambda m: _grouped(m, [60, 200], turned=True),
    ],
    "scaled_mm": [
        partial(_scaled, form=form, types=types, fast=fast)
        for form in scaled.TILES
        for types, fast in ((scaled.PAIRS[0], False), (scaled.PAIRS[1], True))
    ],
    "conv2d": [
        lambda m: (cupyops.conv2d, m(2, 3, 7, 9), m(5, 3, 3, 3), m(5), {"stride": 2, "padding": 1}),
        lambda m: (cupyops.conv2d, m(1, 4, 9, 8), m(6, 2, 3, 3), m(6), (2, 1), (2, 1), (1, 2), 2),
        lambda m: (cupyops.conv2d, m(4, 1, 12, 12), m(32, 1, 2, 3), m(32)),
        lambda m: (
            cupyops.conv2d,
            _channels_last(m(2, 8, 5, 6)),
            _channels_last(m(16, 8, 3, 3)),
            m(16),
            {"padding": 1},
        ),
        lambda m: (cupyops.conv2d, m(1, 50, 3, 3), m(2, 50, 2, 3), m(2), {"padding": 1}),
        lambda m: (cupyops.conv2d, m(1, 3, 7, 6), m(34, 3, 3, 3), m(34), {"padding": (1, 3)}),
        lambda m: (cupyops.conv2d, m(2, 3, 8, 9), m(5, 3, 5, 5), {"padding": 1}),
        lambda m: (cupyops.conv2d, m(3, 6, 5), m(70, 3, 1, 1), m(70)),
        lambda m: (cupyops.conv2d, m(2, 9, 7, 9), m(66, 9, 3, 3), m(66), {"padding": 1, "tile": 64}),
        lambda m: m.half and (cupyops.conv2d, m(2, 16, 6, 7), m(24, 16, 3, 3), m(24), {"padding": 1}),
        lambda m: not m.half and (cupyops.conv2d, m(1, 16, 12, 12), m(136, 16, 2, 2), m(136), {"tile": 128}),
        _beside,
        *[partial(_in_blocks, wide=wide) for wide in (False, True)],
    ],
    "max_pool2d": [
        lambda m: (cupyops.max_pool2d, m(2, 3, 12, 16), 2),
        lambda m: (cupyops.max_pool2d, m(2, 3, 11, 18), 2),
        lambda m: (cupyops.max_pool2d, _channels_last(m(2, 8, 9, 7)), 3, 2, 1),
        lambda m: (cupyops.max_pool2d, m(2, 5, 31, 13), (5, 3), (2, 3), (2, 1), {"ceil_mode": True}),
        lambda m: (cupyops.max_pool2d, m(2, 5, 4), (2, 3), {"stride": (2, 1), "padding": (0, 1), "dilation": (3, 1)}),
        lambda m: (cupyops.max_pool2d, m(3, 2, 9, 8), 3, 1, 1),
        lambda m: (cupyops.max_pool2d, m(1, 2, 6, 7), 5, 1, 2),  # many windows to an element
        lambda m: (cupyops.max_pool2d, m(1, 2, 6, 7), 5, 1, 2, {"return_indices": True}),
        *[
            lambda m, window=window: (cupyops.max_pool2d, m(1, 2, 9, 8), window, 1, 1, {"return_indices": True})
            for window in (2, 3, (2, 3))
        ],
        *[
            lambda m, channels=channels, indices=indices: (
                cupyops.max_pool2d,
                _channels_last(m(2, channels, 9, 7)),
                3,
                {"return_indices": indices},
            )
            for channels, indices in ((3, False), (3, True), (8, True))
        ],
    ],
    "fused_linear_cross_entropy": [
        lambda m: _linear_loss(m, 19, 7, 37, m(37)),
        lambda m: _linear_loss(m, 19, 7, 37, m(37), scratch=900, reduction="sum"),
        lambda m: _linear_loss(m, 21, 9, 1031, scratch=20000, label_smoothing=0.2, class_weight=m(1031).detach().abs()),
        lambda m: _linear_loss(m, 5, 8, 24, reduction="none"),
        lambda m: m.half and _linear_loss(m, 19, 7, 37, m(37), scratch=300),
        lambda m: m.half and _linear_loss(m, 19, 16, 4096, forms=["fused_linear_cross_entropy.forward:persistent"]),
        lambda m: _loss_in_parts(m),
    ],
    "sum": [
        *_reductions(cupyops.sum, cupyops.mean),
        *_by_threads("sum", cupyops.sum),
        lambda m: m.narrow and (cupyops.sum, m(37, 40 * m.width), 1, {"forms": ["sum.forward:registers"]}),
    ],
    "amax": [*_reductions(cupyops.amax, cupyops.amax), *_by_threads("amax", cupyops.amax)],
    "var": [
        *_reductions(cupyops.var, cupyops.var),
        *_by_threads("var", cupyops.var),
        lambda m: m.dtype is torch.float32 and (cupyops.var, m(37, 160), 1, {"forms": ["var.forward:registers"]}),
    ],
    "nll_loss": [
        lambda m: (cupyops.nll_loss, m(300, 5), m.integers(300, high=5)),
        lambda m: (cupyops.nll_loss, m(19, 101), m.integers(19, high=101), m(101).detach().abs(), {"ignore_index": 7}),
        lambda m: (cupyops.nll_loss, m(2, 7, 5, 9), m.integers(2, 5, 9, high=7), {"reduction": "sum"}),
        lambda m: (cupyops.nll_loss, m(300, 5), m.targets(300, 5)),
        lambda m: (cupyops.nll_loss, m(1500, 3), m.integers(1500, high=3), {"reduction": "none"}),
    ],
    "cross_entropy": [
        lambda m: (cupyops.cross_entropy, m(300, 5), m.integers(300, high=5)),
        lambda m: (
            cupyops.cross_entropy,
            m(19, 101),
            m.integers(19, high=101),
            m(101).detach().abs(),
            {"ignore_index": 7},
        ),
        lambda m: (cupyops.cross_entropy, m(3, 1031), m.integers(3, high=1031), {"label_smoothing": 0.2}),
        lambda m: (cupyops.cross_entropy, m(1, 16411), m.integers(1, high=16411), {"reduction": "none"}),
        lambda m: (cupyops.cross_entropy, m(2, 70, 5, 9), m.integers(2, 5, 9, high=70), {"label_smoothing": 0.1}),
        lambda m: (
            cupyops.cross_entropy,
            m(19, 101),
            m.probabilities(19, 101),
            m(101).detach().abs(),
        ),
        lambda m: (cupyops.cross_entropy, m(2, 1031), m.probabilities(2, 1031)),
        lambda m: (cupyops.cross_entropy, m(8500, 5), m.integers(8500, high=5), {"blocks": 1}),
        lambda m: (cupyops.cross_entropy, m(2, 70, 24, 24), m.integers(2, 24, 24, high=70), {"blocks": 1}),
        lambda m: (cupyops.cross_entropy, m(300, 101), m.integers(300, high=101), {"blocks": 1}),
        lambda m: (cupyops.cross_entropy, m(9, 112 * m.width + 3), m.targets(9, 112 * m.width)),
        lambda m: (cupyops.cross_entropy, m(11, 33), m.targets(11, 33)),
        lambda m: (cupyops.cross_entropy, m(3, 1031), m.targets(3, 1031), {"label_smoothing": 0.1}),
        lambda m: (cupyops.cross_entropy, m(300, 101).detach(), m.targets(300, 101), {"blocks": 1}),
        lambda m: (cupyops.cross_entropy, m(3, 1031).detach(), m.targets(3, 1031)),
        lambda m: (cupyops.cross_entropy, m(2100, 20), m.targets(2100, 20), m(20).detach().abs(), {"blocks": 1}),
        lambda m: (cupyops.cross_entropy, m(2, 1152 * m.width), m.targets(2, 1152 * m.width)),
        lambda m: (cupyops.cross_entropy, m(300, 5), m.targets(300, 5)),
        lambda m: (
            cupyops.cross_entropy,
            m(2, 70, 5, 9),
            m.probabilities(2, 70, 5, 9).detach(),
            {"label_smoothing": 0.1},
        ),
    ],
    "adam": [
        lambda m: (cupyops.optim.Adam, m(5000), m(7, 3), m(1), {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-4}),
        lambda m: (cupyops.optim.AdamW, m(4100), _off(m(33)), {"lr": 0.1, "amsgrad": True, "eps": 1e-4}),
        lambda m: (cupyops.optim.AdamW, m(1030), m(3), {"lr": 0.1, "fused": True, "grad_scale": 4.0, "eps": 1e-4}),
    ],
    "adam_half": [
        lambda m: _of_halves(m, "master_weights"),
        lambda m: _of_halves(m, "master_weights", amsgrad=True, fused=True, grad_scale=4.0),
        lambda m: m.dtype is torch.bfloat16 and _of_halves(m, "stochastic_rounding", weight_decay=0.1),
        lambda m: m.dtype is torch.bfloat16 and _of_halves(m, "stochastic_rounding", amsgrad=True, fused=True),
    ],
    "grad_norm": [
        *[
            lambda m, norm=norm: (
                _clipped,
                *(x.detach() for x in (m(9000), m(7, 3), _off(m(600)), m(1))),
                {"max_norm": 0.5, "norm_type": norm},
            )
            for norm in (2.0, float("inf"))
        ],
    ],
    "lion": [
        lambda m: (cupyops.optim.Lion, m(5000), m(7, 3), m(1), {"lr": 0.1, "weight_decay": 0.01}),
        lambda m: (cupyops.optim.Lion, m(4100), _off(m(33)), {"lr": 0.1, "grad_scale": 4.0}),
    ],
    "sgd": [
        lambda m: (cupyops.optim.SGD, m(5000), m(7, 3), m(1), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        lambda m: (cupyops.optim.SGD, m(4100), _off(m(600)), {"lr": 0.1}),
        lambda m: (cupyops.optim.SGD, m(70), m(8, 16), {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
        lambda m: (cupyops.optim.SGD, m(1030), m(3), {"lr": 0.1, "momentum": 0.5, "grad_scale": 4.0}),
    ],
}
