"""Products of pixels that do more in their epilogue: those of a convolution of one tap leave the moments of their results
for the normalisation behind it; those of its gradient add the gradient from another reader of the image.

The kernels are those of "conv2d_moments_wgmma.cu" and "conv2d_add_wgmma.cu".
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned, is_dry
from ..core.forms import Form, Forms, Launch, Library
from ..core.gpu import Gpu, gpu
from ..gemm import gemm, linear, wgmma
from ..gemm.wgmma import Operands

CONSUMERS = 2  # of a block, that leave moments of rows of their own
ROWS = 16  # that a warp measures at once
LEAST = 6_000_000  # elements of the result, of fewer it is not measured
MOST_ADDED_K = 512  # the same of more k, where something is added


class _Tile(wgmma.Tile):
    """A tile of 128 x 128, of a consumer each; the result's rows are pixels."""

    file: str

    def __init__(self, stages: int, slots: int, b_mn: bool) -> None:
        super().__init__("wgmma_128x128", 128, 128, stages, slots, 0.87, pingpong=True, layouts=((False, b_mn),))

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("CLUSTER", "PINGPONG", "LATE"):
            del self.fixed[name]
        return self.kernel_of(f"{self.file}.cu", self.file)

    def why_slower(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """Return why PyTorch's functions are faster, as far as was measured, or None."""
        if not gpu.library:
            return None
        waves, tiles = self._waves(problem, gpu), self._tiles(problem)
        if tiles < wgmma.FULL * waves * gpu.multiprocessors:
            return "some of the multiprocessors have no work in the last wave"
        return "it is not measured for so few elements" if problem.m * problem.n < LEAST else None

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Launch:
        """Launch of the product, with the kernel's own arguments."""
        of = super().launch(problem, gpu)
        template = {name: of.template[name] for name in ("T", *self.fixed)}
        return replace(of, template=template, args=(*of.args[:3], of.args[-1]))


class Measured(_Tile):
    """Its epilogue sums the columns of what it stores; all tiles of a block are of the same columns."""

    file = "conv2d_moments_wgmma"
    measured = (
        "with the normalisation behind it 0.69 to 0.87 of the time of cuDNN and a pass for the moments, on an H100"
    )

    def __init__(self) -> None:
        super().__init__(6, 2, False)
        self.summary += "; and the moments of its columns"

    def why_not(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """It measures so many rows at once, and has a block for each column of tiles."""
        if problem.m % ROWS:
            return f"pixels are no multiple of {ROWS}"
        if ceil_div(problem.n, self.n) > gpu.multiprocessors:
            return "there are too many filters"
        return super().why_not(problem, gpu)

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Launch[Operands]:
        """Launch as many blocks as run at once, equally many for each column of tiles."""
        of = super().launch(problem, gpu)
        columns = ceil_div(problem.n, self.n)
        assert isinstance(of.grid, int)
        rows = of.grid // columns
        return replace(of, grid=rows * columns, extra=of.extra._replace(parts=rows * CONSUMERS), args=of.args[:3])


class Added(_Tile):
    """TMA brings to its slots what is added, while the tile before is multiplied."""

    file = "conv2d_add_wgmma"
    measured = "0.55 to 0.66 of the time of cuDNN's gradient and a sum, on an H100"

    def __init__(self) -> None:
        super().__init__(5, 4, True)
        self.summary += "; and what is added"

    @property
    def shared(self) -> int:
        """Two barriers more."""
        return super().shared + 16

    def why_slower(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """Return why PyTorch's functions are faster, as far as was measured, or None."""
        if gpu.library and problem.k > MOST_ADDED_K:
            return "it is not measured for so large a k"
        return super().why_slower(problem, gpu)


class Apart(Form[gemm.Problem]):
    """PyTorch's functions, one after the other."""

    name = "apart"
    summary = "PyTorch's convolution or its gradient, and then a pass for what is beside"

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Library:
        """Nothing of ours."""
        return Library(self.name)


MOMENTS: Forms[gemm.Problem] = Forms("conv2d", "moments", (Measured(), Apart()))
ADDED: Forms[gemm.Problem] = Forms("conv2d", "backward_added", (Added(), Apart()))


def problem_of(image: Tensor, filters: int, turned: bool) -> gemm.Problem:
    """Problem of an image in channels_last and `filters` filters; turned: for the gradient of the image."""
    images, channels, height, width = image.shape
    rows, weight = images * height * width, ((filters, channels), (channels, 1))
    k = filters if turned else channels
    return linear.problem((rows, k), (k, 1), False, *weight, not turned, False, image.dtype)


def measure(launch: Launch[Operands], x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """y = x correlated with weight, in memory [pixels, channels]; the moments of its channels, [parts, channels, 2], each a
    mean and the sum of the squares of what differs from it, and of how many pixels each part is."""
    of = launch.extra
    moments = x.new_empty((of.parts, weight.shape[0], 2), dtype=torch.float32)
    counts = x.new_empty(of.parts, dtype=torch.float32)
    if not is_dry(x):
        launch(of.a.map(x), of.b.map(weight), of.y.map(y, written=True), moments, counts)
    return moments, counts


def add(launch: Launch[Operands], grad_y: Tensor, weight: Tensor, more: Tensor, grad_x: Tensor) -> None:
    """grad_x = the gradient of a convolution's image + more, all in memory as [pixels, channels]."""
    of = launch.extra
    launch(of.a.map(grad_y), of.b.map(weight), of.y.map(more), of.y.map(grad_x, written=True))


# --- as calls of a compiled graph, which give lists of tensors ---


def conv2d_moments(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Convolution of one tap of an image in channels_last; and its moments with their counts, as `measure` gives them."""
    launch = MOMENTS.plan(problem_of(x, len(weight), False), gpu(x.device))
    if isinstance(launch, Library):  # the graph was made where the kernel was chosen, and is not run there
        y = torch.conv2d(x, weight)
        var, mean = torch.var_mean(y.float(), (0, 2, 3), correction=0)
        pixels = y.numel() // y.shape[1]
        return [y, torch.stack((mean, var * pixels), 1)[None], y.new_full((1,), pixels, dtype=torch.float32)]
    images, _, height, width = x.shape
    y = x.new_empty((images, height, width, len(weight))).permute(0, 3, 1, 2)
    return [y, *measure(launch, _whole(x), _matrix(weight), y)]


def conv2d_add(grad_y: Tensor, weight: Tensor, more: Tensor) -> list[Tensor]:
    """Gradient of the image of a convolution of one tap, plus `more`; all but the weight in channels_last."""
    launch = ADDED.plan(problem_of(more, len(weight), True), gpu(more.device))
    if isinstance(launch, Library):
        return [torch.nn.functional.conv_transpose2d(grad_y, weight) + more]
    images, channels, height, width = more.shape
    grad_x = more.new_empty((images, height, width, channels)).permute(0, 3, 1, 2)
    if not is_dry(more):
        add(launch, _whole(grad_y), _matrix(weight), _whole(more), grad_x)
    return [grad_x]


def _whole(image: Tensor) -> Tensor:
    """An image in channels_last that begins at a 16-byte boundary."""
    return _aligned(image.contiguous(memory_format=torch.channels_last))


def _matrix(weight: Tensor) -> Tensor:
    """Filters of one tap as rows."""
    return _aligned(weight.reshape(weight.shape[:2]).contiguous())


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if is_dry(tensor) or aligned(tensor) else tensor.clone()
