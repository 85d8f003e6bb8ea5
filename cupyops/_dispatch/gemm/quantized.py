"""Forms of linear layers whose weight is stored in 8 or 4 bits (cuda_src/quantized_linear.cu)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import HALF, Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from ..core.library import ByPyTorch

E4M3 = torch.float8_e4m3fn
BITS = {torch.int8: 8, E4M3: 8, torch.uint8: 4}  # of a number, by the dtype that stores them
MIDDLE = 8  # the zero point of 4-bit numbers that are given none
MOST_ROWS = 64  # up to which the kernel is chosen: with more the product is not bound by reading the weight
_NAMES = {torch.int8: "quantized::Int8", E4M3: "quantized::E4M3", torch.uint8: "quantized::UInt4"}
_OUTPUTS, _ROWS = 16, 8  # of the weight that a block has, and of x in a tile
_TILES = (1, 2, 4)
_MOST_WARPS = 16
_PARTIAL = 20  # floats of a row of a warp's sums
_BUSY = 32  # warps of a multiprocessor that are to read at one time


def _exists(W: str, BYTES: int, **_: object) -> bool:
    """Four bytes have too few numbers of 8 bits for a vector of x."""
    return BYTES > 4 or _NAMES[torch.uint8] == W


quantized_linear_fwd = Kernel(
    "quantized_linear.cu",
    "quantized_linear_fwd<T, W, TILES, BYTES>",
    T=HALF,
    W=tuple(_NAMES.values()),
    TILES=_TILES,
    BYTES=(16, 8, 4),
    where=_exists,
)


class Problem(NamedTuple):
    """y[m, n] = sum over k of x[m, k] w[n, k], of which each `group` of k has a scale."""

    m: int
    n: int
    k: int
    group: int
    weight: torch.dtype  # the dtype that stores the numbers
    dtype: torch.dtype  # of x and y
    unit: int  # bytes, up to 16, that addresses and lengths of the weight's rows are multiples of


class FewRows(Form[Problem]):
    """Warps of a block read shares of k of 16 rows of the weight, each byte once."""

    name = "few_rows"
    kernel = quantized_linear_fwd
    summary = (
        "a block owns 16 rows of the weight, which its warps divide along k; by MMA, numbers converted in registers"
    )

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """It has half types, rows of whole vectors, and groups of whole steps."""
        p = problem
        if p.dtype not in HALF:
            return f"it is not for {p.dtype}"
        if 0 < gpu.capability < 8:
            return "it needs compute capability 8.0"
        if not (p.m and p.n and p.k and p.group):
            return "a size of 0"
        if p.k % 8:
            return f"k is {p.k}, no multiple of 8"
        if _bytes(p) is None:
            return f"rows of the weight, or groups of {p.group}, are no whole vectors"
        if max(p.m, p.n, p.k) >= 1 << 30 or ceil_div(p.m, _ROWS * _TILES[-1]) > 65535:
            return "it is too large"
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Number of warps that keep a multiprocessor busy with the blocks that it has, each with a step of k at least."""
        p, size = problem, _bytes(problem)
        assert size is not None
        tiles = next((n for n in _TILES if _ROWS * n >= p.m), _TILES[-1])
        blocks = ceil_div(p.n, _OUTPUTS), ceil_div(p.m, _ROWS * tiles)
        wanted = ceil_div(_BUSY, ceil_div(blocks[0] * blocks[1], gpu.multiprocessors))
        warps = min(_MOST_WARPS, max(4, wanted), ceil_div(p.k, _step(p, size)))
        return Launch(
            self.kernel,
            blocks,
            32 * warps,
            warps * tiles * _ROWS * _PARTIAL * 4,
            {"T": p.dtype, "W": _NAMES[p.weight], "TILES": tiles, "BYTES": size},
            overlap=gpu.capability >= 9,
        )


def _step(p: Problem, size: int) -> int:
    """Elements of k in a step of a warp whose lanes read so many bytes."""
    return 4 * size * 8 // BITS[p.weight]


def _bytes(p: Problem) -> int | None:
    """Bytes that a lane reads at a time: the most that rows are multiples of, and groups whole steps of."""
    return next(
        (
            size
            for size in (16, 8, 4)
            if p.unit % size == 0
            and _exists(_NAMES[p.weight], size)
            and (p.group == p.k or p.group % _step(p, size) == 0)
        ),
        None,
    )


def _why_ours(problem: Problem, gpu: Gpu) -> str | None:
    """Return why the kernel is chosen, or None: for more rows it reads the weight more than twice."""
    return f"{problem.m} rows, no more than {MOST_ROWS}" if problem.m <= MOST_ROWS else None


PRODUCT: Forms[Problem] = Forms("quantized_linear", "product", [ByPyTorch(_why_ours), FewRows()])


def problem_of(rows: int, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Problem:
    """Problem of `rows` rows of x of a dtype."""
    n, packed = weight.shape
    k = packed * 8 // BITS[weight.dtype]
    group = k // scale.shape[1] if scale.shape[1] else 0
    pitch = weight.stride(0)
    unit = 16
    while unit > 1 and (pitch % unit or packed % unit or not aligned(weight, unit)):
        unit //= 2
    return Problem(rows, n, k, group, weight.dtype, dtype, unit if weight.stride(1) == 1 or packed == 1 else 1)


def multiply(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, y: Tensor
) -> None:
    """y = x w^T + bias, of rows x; y is contiguous."""
    problem = problem_of(x.shape[0], weight, scale, x.dtype)
    if x.stride(1) != 1 or x.stride(0) % 8 or not aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    stored = weight if weight.dtype is torch.uint8 else weight.view(torch.uint8)
    scale = _readable(scale, x.dtype)
    zero = None if zero_point is None else _readable(zero_point, x.dtype)
    PRODUCT.launch(problem, gpu(y.device))(
        x,
        stored,
        *_by_type(scale),
        *_by_type(zero),
        bias if bias is None else bias.contiguous(),
        y,
        *scale.stride(),
        *(scale if zero is None else zero).stride(),
        weight.stride(0),
        x.stride(0),
        *problem[:4],
    )


def _readable(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors of float32, or of the dtype of x; those of another as float32."""
    return factors if factors.dtype in (dtype, torch.float32) else factors.float()


def _by_type(factors: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The two pointers of the kernel, to float32 and to the dtype of x, one or both of which are null."""
    if factors is None:
        return None, None
    return (factors, None) if factors.dtype is torch.float32 else (None, factors)
