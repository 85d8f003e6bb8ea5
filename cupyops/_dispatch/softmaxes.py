"""The forms of softmax and log_softmax, and the checks of their arguments.

Both see a contiguous input as (outer, size, inner) around the dimension that sums to 1; a row is `size` elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, Kernel
from .._util import arguments
from .._util.strides import aligned, is_dry
from .core import persistent
from .core.forms import Form, Forms, Launch
from .core.gpu import Gpu, gpu
from .core.rows import PACKS, SMALL_ROWS, WIDEST, Share, grid, power_of_two, share, split

FILE = "softmax.cu"
HALF = (torch.float16, torch.bfloat16)
SINGLE = (*HALF, torch.float32)  # fp64 has the general form alone
BOTH = (False, True)

DEFINE = {
    "BLOCK_VECTORS": PACKS[-1],  # of a row that each thread of the form `block` has in registers
    "TINY_SLOTS": 16,  # elements, or pairs of a half type, that each thread of `tiny_rows` has at most
    "TWO_PASS_THREADS": 512,  # of a block of `two_pass`, at most
    "TWO_PASS_BLOCKS": 2,  # of those on a multiprocessor: one reads while the other reduces
}
_LAMBDAS = ("-default-device",)  # without which NVRTC takes a lambda of an auto parameter for host code
_WARP = 32
_TINY_BLOCK = 6144  # bytes of a tensor that a block of `tiny_rows` reads at a time, at least
_TINY_BLOCKS = 8  # of those for each multiprocessor, before a block takes more rows than it has threads for


class Problem(NamedTuple):
    """Sizes and flags by which a form is chosen. `dtype` is that of x and grad_x; `widen`: y and grad_y are float32."""

    outer: int
    size: int
    inner: int
    dtype: torch.dtype
    widen: bool
    aligned: bool  # every tensor begins at a 16-byte boundary


class _SoftmaxForm(Form[Problem]):
    """A form of one direction: `backward` reads grad_y and y where forward reads x."""

    def __init__(self, kernel: Kernel, backward: bool) -> None:
        self.kernel, self.backward = kernel, backward

    def itemsize(self, problem: Problem) -> int:
        """Bytes of an element that is read."""
        return 4 if self.backward and problem.widen else problem.dtype.itemsize

    def template(self, problem: Problem) -> dict[str, Any]:
        """The template values of every form."""
        widen = {"WIDEN": problem.widen} if "WIDEN" in self.kernel.template else {}
        return {"T": problem.dtype, **widen}

    def in_registers(self, problem: Problem) -> Share:
        """Division of a row among the registers of threads."""
        return share(problem.size, self.itemsize(problem), WIDEST)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.inner > 1:
            return "the elements of a row do not lie side by side"
        if problem.dtype is torch.float64:
            return "fp64 has one kernel, two_pass"
        if problem.widen and "WIDEN" not in self.kernel.template:
            return "no kernel of this form casts"
        return None


class SubWarp(_SoftmaxForm):
    name = "sub_warp"
    summary = "the lanes of a warp, or fewer, have one vector of a row each in registers"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if self.in_registers(problem).packs != 1:
            return "a row has more than 32 vectors"
        return super().why_not(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        division = self.in_registers(problem)
        return Launch(self.kernel, grid(problem.outer, division.rows), division.block, template=self.template(problem))


class TinyRows(SubWarp):
    name = "tiny_rows"
    summary = "a few threads take a row from shared memory, to which a block copies its rows as one array"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.size * problem.dtype.itemsize % 16 == 0:
            return "rows of whole vectors need no copy in shared memory"
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        rows, size, itemsize = problem.outer, problem.size, problem.dtype.itemsize
        few = size // (2 if itemsize == 2 else 1)
        threads = power_of_two(-(-few // DEFINE["TINY_SLOTS"]))
        at_once = SMALL_ROWS // threads
        enough = at_once * _TINY_BLOCKS * gpu.multiprocessors
        times = min(-(-_TINY_BLOCK // (at_once * size * itemsize)), max(rows // enough, 1))
        shared = at_once * times * size * itemsize * (2 if self.backward else 1)
        block, rows_each = (threads, at_once), at_once * times
        grid, template = -(-rows // rows_each), self.template(problem)
        return Launch(self.kernel, grid, block, shared, template, named={"rows_each": rows_each})


class Block(_SoftmaxForm):
    name = "block"
    summary = "half a warp to a block has several vectors of a row in the registers of each thread"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not problem.aligned:
            return "a tensor begins off a 16-byte boundary"
        if problem.size < self._width(problem):
            return "a row is shorter than a vector"
        if not self._division(problem).packs:
            return "a row is too long for the registers of a block"
        return super().why_not(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        division = self._division(problem)
        return Launch(self.kernel, grid(problem.outer, division.rows), division.block, template=self.template(problem))

    def _width(self, problem: Problem) -> int:
        return 16 // self.itemsize(problem)

    def _division(self, problem: Problem) -> Share:
        """Division of the whole vectors of a row: 16 threads or more, since each element before and behind needs one."""
        width = self._width(problem)
        return share(max(problem.size // width, _WARP + 1) * width, self.itemsize(problem), WIDEST)


class Persistent(_SoftmaxForm):
    name = "persistent"
    summary = "a block or a cluster keeps a row in shared memory, and copies the next one while it writes this one"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        return None if self._plan(problem, gpu) else "the shared memory of a block, or of a cluster, holds no row"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return "a row is short enough for a cache to hold it" if self.in_registers(problem).packs else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem, gpu)
        assert plan is not None
        return plan.launch(self.kernel, problem.outer, **self.template(problem))

    def _plan(self, problem: Problem, gpu: Gpu) -> persistent.Plan | None:
        itemsize = self.itemsize(problem)
        return persistent.plan(problem.size, itemsize, 1 + self.backward, gpu, _threads(problem.dtype, self.backward))


class TwoPass(_SoftmaxForm):
    name = "two_pass"
    summary = "a block reads a row twice; where inner > 1, neighbouring threads are on neighbouring columns"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        blocks, block = self._rows(problem) if problem.inner == 1 else self._columns(problem)
        template, named = self.template(problem), {"inner": problem.inner}
        return Launch(self.kernel, grid(blocks), block, template=template, named=named)

    def _rows(self, problem: Problem) -> tuple[int, tuple[int, int]]:
        """Return (grid, block) with a block for each row: for short rows only as many threads as vectors."""
        vectors = -(-problem.size * self.itemsize(problem) // 16)
        threads = -(-vectors // (PACKS[-1] * _WARP)) * _WARP
        return problem.outer, (min(threads, DEFINE["TWO_PASS_THREADS"]), 1)

    def _columns(self, problem: Problem) -> tuple[int, tuple[int, int]]:
        """Blocks, and the block: (threads on neighbouring columns, threads that share a column)."""
        columns = problem.outer * problem.inner
        neighbours = min(power_of_two(columns), _WARP)
        sharing = min(power_of_two(-(-problem.size // 8)), DEFINE["TWO_PASS_THREADS"] // neighbours)
        if problem.dtype in HALF and problem.inner % 2 == 0:  # a thread has two columns
            columns //= 2
        threads = min(power_of_two(columns), max(neighbours, 128 // sharing))
        return -(-columns // threads), (threads, sharing)


def _threads(dtype: torch.dtype, backward: bool) -> tuple[int, ...]:
    """Block sizes of `persistent`: in backward, rows that smaller blocks could keep are better in registers."""
    return (1024,) if backward or dtype is torch.float32 else (512, 1024)


def _forms(direction: str, backward: bool) -> tuple[_SoftmaxForm, ...]:
    def kernel(form: type[_SoftmaxForm], template: str, **domain: Any) -> _SoftmaxForm:
        function = f"softmax_{direction}_{form.name}<T{template}>"
        return form(Kernel(FILE, function, define=DEFINE, options=_LAMBDAS, **domain), backward)

    def persistent_exists(T: torch.dtype, THREADS: int, BLOCKS: int, OWN: int) -> bool:
        return THREADS in _threads(T, backward) and persistent.exists(1 + backward, THREADS, BLOCKS, OWN)

    widened: dict[str, Any] = {"WIDEN": BOTH, "where": lambda T, WIDEN: T in HALF or not WIDEN}
    threads = persistent.domain(1 + backward, _threads(torch.float16, backward))
    return (
        kernel(TinyRows, "", T=SINGLE),
        kernel(SubWarp, "", T=SINGLE),
        kernel(Block, ", WIDEN", T=SINGLE, **widened),
        kernel(Persistent, ", THREADS, BLOCKS, OWN", T=SINGLE, **threads, where=persistent_exists),
        kernel(TwoPass, ", WIDEN", T=FLOATING, **widened),
    )


_FORWARD, _BACKWARD = _forms("fwd", backward=False), _forms("bwd", backward=True)


def forms(name: str) -> tuple[Forms[Problem], Forms[Problem]]:
    """The forms of forward and of backward as the lists of the operator `name`."""
    return Forms(name, "forward", _FORWARD), Forms(name, "backward", _BACKWARD)


def launch(forms: Forms[Problem], dim: int, dtype: torch.dtype, *tensors: Tensor, log: bool = False) -> None:
    """Launch the form that fits `tensors`, which are contiguous; `dtype` is that of x and grad_x. `log`: of log_softmax."""
    outer, size, inner = split(tensors[0], dim)
    if is_dry(tensors[0]) or not tensors[0].numel():
        return
    widen = any(tensor.dtype is not dtype for tensor in tensors)
    problem = Problem(outer, size, inner, dtype, widen, all(map(aligned, tensors)))
    chosen = forms.launch(problem, gpu(tensors[0].device))
    chosen(*tensors, outer, size, log=log)


def widens(dtype: torch.dtype, to: torch.dtype | None) -> bool:
    """Return True if the kernels cast from `dtype` to `to`: from a half type to float32."""
    return to is torch.float32 and dtype in HALF


def give_roles(op: Any, lists: tuple[Forms[Problem], Forms[Problem]], log: bool = False) -> None:
    """Give the operator of softmax, or of log_softmax, its launches, forward and backward."""
    gradient = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data

    @op.unsupported
    def unsupported(x: Tensor, dim: int, dtype: torch.dtype | None) -> str | None:
        return None if dtype in (None, x.dtype) or widens(x.dtype, dtype) else f"no kernel from {x.dtype} to {dtype}"

    @op.forward
    def forward(x: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
        x = x.contiguous()
        y = torch.empty_like(x, dtype=dtype)
        launch(lists[0], dim, x.dtype, x, y, log=log)
        return y, (
            x.new_empty(0),
        ) if y.dtype is not x.dtype else ()  # the gradient's dtype, since x itself is not saved

    @op.backward
    def backward(saved: Any, grad_y: Tensor, y: Tensor, dim: int) -> Tensor:
        grad_x = torch.empty_like(y, dtype=saved[0].dtype if saved else None)
        launch(lists[1], dim, grad_x.dtype, grad_y, y, grad_x, log=log)
        return grad_x

    @op.reference_backward
    def reference_backward(saved: Any, grad_y: Tensor, y: Tensor, dim: int) -> Tensor:
        grad_x: Tensor = gradient(grad_y, y, dim, y.dtype)
        return grad_x.to(saved[0].dtype) if saved else grad_x


def checked_arguments(
    name: str, input: Tensor, dim: int | None, dtype: torch.dtype | None
) -> tuple[Tensor, int, torch.dtype | None]:
    """The arguments of the function `name`, checked: `dim` from 0 on, `input` cast where the kernels do not."""
    arguments.tensor("input", input)
    arguments.choice("dtype", dtype, (None, *FLOATING))
    if dtype is None and input.dtype not in FLOATING:
        arguments.fail(
            "input", input, "a tensor of dtype float16, bfloat16, float32 or float64, or a dtype to cast it to"
        )
    if dtype is not None and input.is_complex():
        arguments.fail("input", input, "a tensor of a real dtype")
    dim = arguments.dim("dim", _implicit_dim(name, input.dim()) if dim is None else dim, input.dim())
    if dtype is not None and not widens(input.dtype, dtype):
        input = input.to(dtype)
    return input, dim, dtype


def _implicit_dim(name: str, ndim: int) -> int:
    """PyTorch's choice where `dim` is not given, with PyTorch's warning."""
    arguments.warn(
        f"Implicit dimension choice for {name} has been deprecated. Change the call to include dim=X as an argument."
    )
    return 0 if ndim in (0, 1, 3) else 1
