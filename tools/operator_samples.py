"""Small calls of every operator: each kernel of cuda_src, several blocks, tails, vectors and single elements.

They are the samples of the operators' contracts in tests/ops, each also on the smallest of GPUs, where a block has several
rows or tiles to do. A line here adds what those samples do not reach.
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
from cupyops._dispatch.conv import pointwise_fused
from cupyops._dispatch.conv.image_blocks import Side, blocks_of
from cupyops._dispatch.core import rows
from cupyops._dispatch.core.forms import use_form
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.gemm import epilogues, few_rows, few_rows_layers, gemm, grouped, scaled, wgmma
from cupyops._dispatch.loss import linear_parts as linear_loss_parts
from cupyops._kernel.compile.source import cuda_src
from cupyops.ops._group_norm import group_norm_alike
from cupyops.testing import assume_gpu

_TESTS = Path(__file__).resolve().parents[1] / "tests"
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
    """The smallest of GPUs, on which grids with a limit have so few blocks that each strides over several rows or tiles.
    0: as always."""
    before = rows._MAX_GRID
    rows._MAX_GRID = blocks or before
    try:
        with assume_gpu(**({"multiprocessors": 1, "max_blocks": blocks} if blocks else {})):
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
    for operator in sorted(_operators()):
        for name in _CONTRACTS.get(operator, (operator,)):
            if (_TESTS / "ops" / f"test_{name}.py").is_file():
                yield from ((operator, call) for call in _of_contract(name))
        yield from ((operator, call) for call in _FURTHER.get(operator, ()))


@functools.cache
def _operators() -> frozenset[str]:
    """The names that tell operators apart: those of the tables, and of the modules with a file of kernels of their name."""
    modules = (path.stem.removeprefix("_") for path in Path(cupyops.ops.__file__).parent.glob("_[!_]*.py"))
    return frozenset({*_CONTRACTS, *_FURTHER, *(name for name in modules if (cuda_src() / f"{name}.cu").is_file())})


def _of_contract(name: str) -> Iterator[Call]:
    """The samples of an operator's contract, each also on the smallest of GPUs."""
    for folder in (_TESTS, _TESTS / "support"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    contract: Any = importlib.import_module("samples").contract(name)
    made = importlib.import_module("contract").Make

    def call(index: int, blocks: int, make: Make) -> tuple[Any, ...]:
        sample = [*contract().samples(made("cpu", make.dtype))][index]
        sample = sample.map(lambda tensor: make._given(tensor.detach()).requires_grad_(tensor.requires_grad))
        return contract.function, *sample.args, {**sample.kwargs, "blocks": blocks}

    for index in range(len([*contract().samples(made("cpu", torch.float32))])):
        yield from (partial(call, index, blocks) for blocks in (0, 1))


def operator_of(file: str) -> str:
    """The operator whose kernels a .cu file has: the longest name with which the file's begins, as conv2d_direct.cu's."""
    stem = file.removesuffix(".cu")
    return max((name for name in _operators() if f"{stem}_".startswith(f"{name}_")), key=len, default=stem)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.detach().to(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def _off(tensor: Tensor) -> Tensor:
    """The same values, one element past a 16-byte boundary."""
    flat = tensor.detach().flatten()
    return torch.cat([flat[:1], flat])[1:].view(tensor.shape).requires_grad_(tensor.requires_grad)


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
    lists: tuple[Any, ...] = pointwise_fused.MOMENTS, pointwise_fused.ADDED
    moments, added = (forms.list[0] for forms in lists)
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


def _by_wgmma(m: Make, form: wgmma.Tile, layout: tuple[bool, bool]) -> Any:
    """A product by one form, of operands stored as one of its kernels takes them."""
    if not m.hopper:
        return ()
    a, b = m(136, 264).detach(), m(264, 280).detach()
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
    """A gated layer behind an RMS norm, of few rows, which has no gradient."""
    if m.dtype not in few_rows.NORMALISED:
        return ()
    given = m(5, 328).detach(), m(328).detach(), 1e-5, m(40, 328).detach(), m(40, 328).detach(), "silu"
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


def _tiled(call: Callable[[Make, int], Any]) -> list[Call]:
    """A call by each tile that there is for the dtype."""

    def of(tile: int) -> Call:
        return lambda m: tile in gemm.tiles_for(m.dtype, wide=True) and call(m, tile)

    return [of(tile) for tile in (*gemm.tiles_for(torch.float16, wide=True), *gemm.tiles_for(torch.float32))]


# the contracts that reach the kernels of a file which is not of one operator alone
_CONTRACTS = {
    "gated": ("swiglu", "geglu"),
    "gemm": ("matmul", "linear"),
    "norm": ("layer_norm", "rms_norm", "add_rms_norm"),
}
_FURTHER: dict[str, list[Call]] = {
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
    "column_finalize": [
        lambda m: (cupyops.scale_shift, m(3001, 8), m(8), m(8)),
        lambda m: (cupyops.bias_gelu, m(700, 37), m(37)),
    ],
    "loss_finalize": [
        lambda m: (cupyops.nll_loss, m(5000, 3), m.integers(5000, high=3)),
        lambda m: (cupyops.cross_entropy, m(300, 40), m.integers(300, high=40), {"reduction": "sum"}),
    ],
    "embedding": [
        lambda m: (cupyops.embedding, m.integers(300, high=5), m(5, 40), 2, {"forms": ["embedding:sorted"]}),
    ],
    "group_norm": [
        lambda m: (group_norm_alike, _channels_last(m(2, 16, 9, 8)), 2, m(16), m(16), 1e-5),
        lambda m: (group_norm_alike, _channels_last(m(1, 560, 23, 19)), 8, m(560), None, 1e-5),
    ],
    "gemm": [
        *_tiled(lambda m, tile: (cupyops.matmul, m(136, 72), m(72, 136), {"tile": tile})),
        *_tiled(lambda m, tile: (cupyops.linear, m(136, 72), m(136, 72), {"tile": tile})),
    ],
    "softmax": [
        lambda m: m.half and (cupyops.softmax, m(3, 320), 1, {"dtype": torch.float32}),
        lambda m: m.half and (cupyops.softmax, m(3, 32776), 1, {"dtype": torch.float32}),
    ],
    "cross_entropy": [lambda m: (cupyops.cross_entropy, m(2, 1152 * m.width), m.targets(2, 1152 * m.width))],
    "max_pool2d": [lambda m: (cupyops.max_pool2d, _channels_last(m(2, 3, 9, 7)), 3, {"return_indices": True})],
    "few_rows": [
        *[partial(_few_rows, rows=rows) for rows in (1, 4, 8, 16, 32, 64)],
        lambda m: (
            m.narrow and (cupyops.gated_linear, m(3, 72), m(40, 72), m(40, 72), {"forms": ["gated_linear:few_rows"]})
        ),
        _normalised,
    ],
    "linear_act": [
        *_tiled(
            lambda m, tile: (cupyops.linear_act, m(67, 72), m(136, 72), m(136), "relu", m(67, 136), {"tile": tile})
        ),
        *[partial(_activated, activation=activation) for activation in epilogues.ACTIVATIONS],
    ],
    "gated_linear": [
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
        lambda m: (cupyops.conv2d, m(2, 9, 7, 9), m(66, 9, 3, 3), m(66), {"padding": 1, "tile": 64}),
        lambda m: not m.half and (cupyops.conv2d, m(1, 16, 12, 12), m(136, 16, 2, 2), m(136), {"tile": 128}),
        _beside,
        *[partial(_in_blocks, wide=wide) for wide in (False, True)],
    ],
    "fused_linear_cross_entropy": [
        lambda m: _linear_loss(m, 19, 7, 37, m(37), scratch=900, reduction="sum"),
        lambda m: _linear_loss(m, 21, 9, 1031, scratch=20000, label_smoothing=0.2, class_weight=m(1031).detach().abs()),
        lambda m: m.half and _linear_loss(m, 19, 7, 37, m(37), scratch=300),
        lambda m: m.half and _linear_loss(m, 19, 16, 4096, forms=["fused_linear_cross_entropy.forward:persistent"]),
        lambda m: _loss_in_parts(m),
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
