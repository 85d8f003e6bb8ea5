"""The checks of the course's exercises. Each runs a student's kernel in the simulator and says what is wrong with it.

A check looks at four things, in this order: whether the simulator finds a fault, whether everything was written, whether
the values are right, and what the launch cost. Values that are wrong in a known way are explained by their cause: the
check computes what each common mistake would have given, and compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops.simulator.profile import Profile

# What each fault of the simulator means, most often, in a first kernel.
FAULTS = {
    "OutOfBounds": "An index leads outside of a tensor or a __shared__ array. Is a guard such as `if (i < n)` missing, "
    "or off by one?",
    "Race": "Two threads meet at one place of memory, one of them writes, and nothing says which of them comes first. "
    "Between the two accesses a `__syncthreads()` is missing; in global memory use an atomic, or let one thread do it.",
    "BarrierFault": "Some threads of the block wait at a `__syncthreads()` that the others do not reach. A barrier "
    "must not stand under a condition that differs between threads, nor below a `return` that some of them take.",
    "Uninitialized": "The kernel uses a value that nothing has written yet: memory from `torch.empty` or a "
    "`__shared__` array holds anything at first. Write it before you read it.",
    "StepLimit": "The kernel does not end. Does the variable of the loop change in every pass?",
    "WarpFault": "An instruction of the whole warp was run by a part of it. All 32 threads must come to it together.",
    "Misaligned": "An access of several elements at once begins at an address that is no multiple of its size.",
}

Mistake = tuple[Tensor, str]  # what it would have given, and its cause in words


class NotYet(Exception):
    """The kernel is not right yet; the message says why."""


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Make a check print what it finds, in place of an error that would stop the notebook."""

    @functools.wraps(check)
    def run(kernel: cupyops.Kernel) -> None:
        try:
            print(f"Right. {check(kernel)}")
        except NotYet as found:
            print(f"Not yet. {found}")

    return run


def simulated(
    kernel: cupyops.Kernel,
    grid: Any,
    block: Any,
    arguments: Callable[[Tensor], Sequence[Any]],
    shape: Sequence[int],
    faults: Mapping[str, str] | None = None,
) -> tuple[Tensor, Profile]:
    """The kernel's output, and what the launch cost. Raises `NotYet` for a fault, and where nothing was written.

    Args:
        kernel: the student's.
        grid, block: of the launch.
        arguments: the kernel's, given its output.
        shape: of the output, which holds nothing before the launch.
        faults: in place of those of `FAULTS`, what a fault means in this exercise.
    """
    with cupyops.simulate(profile=True), cupyops.trace() as trace:
        y = torch.empty(*shape)
        before = y.view(torch.int32).clone()
        try:
            kernel[grid, block](*arguments(y))
        except cupyops.SimulatorError as fault:
            kind = type(fault).__name__
            meaning = {**FAULTS, **(faults or {})}.get(kind, "The kernel does what it must not.")
            raise NotYet(f"{meaning}\n\nThe simulator says ({kind}):\n{fault}") from None
        except cupyops.LaunchError as error:
            raise NotYet(f"The launch was refused; leave the kernel's parameters as they were.\n\n{error}") from None
    unwritten = (y.view(torch.int32) == before).flatten()
    if unwritten.all():
        raise NotYet("The kernel has written nothing to its output yet. The comments in the cell say what to add.")
    if unwritten.any():
        first, count = int(unwritten.nonzero()[0]), int(unwritten.sum())
        raise NotYet(
            f"{count} of {y.numel()} elements were not written; the first of them is number {first}. Which thread is "
            "to write it, and which index does that thread compute?"
        )
    return y, trace.launches()[0].profile


def compare(found: Tensor, expected: Tensor, mistakes: Sequence[Mistake] = (), tolerance: float = 1e-4) -> None:
    """Raise `NotYet` where values are wrong: with the cause, where a known mistake gives just these."""
    if _same(found, expected, tolerance):
        return
    for wrong, cause in mistakes:
        if _same(found, wrong, tolerance):
            raise NotYet(cause)
    bad = ((found - expected).abs() > tolerance * (1 + expected.abs())) | found.isnan()
    place = tuple(bad.nonzero()[0].tolist())
    raise NotYet(
        f"{int(bad.sum())} of {found.numel()} values are wrong. The first is {list(place)}: {found[place]:.6g}, "
        f"expected {expected[place]:.6g}."
    )


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b.to(a.dtype), rtol=tolerance, atol=tolerance)


def executions(profile: Profile, *opcodes: str) -> int:
    """How many threads ran the PTX instructions that begin so."""
    texts = profile.listing.instructions
    return sum(counts.threads for pc, counts in profile.instructions.items() if texts[pc].text.startswith(opcodes))


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are the same each time."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# --- the exercises, in the order of the notebooks -----------------------------------------------------------------------


@exercise
def threads(kernel: cupyops.Kernel) -> str:
    """`blend(a, b, y, t, n)`: y = (1 - t) a + t b."""
    n, t = 1000, 0.25
    a, b = random(n), random(n, seed=1)
    try:
        y, _ = simulated(kernel, 4, 256, lambda y: (a, b, y, t, n), [n])
    except NotYet as found:
        if "first of them is number 256" in str(found):
            raise NotYet(
                "Only elements 0 to 255 were written: in each block threadIdx.x counts from 0. Where does block number "
                "blockIdx.x begin, when each block has blockDim.x threads?"
            ) from None
        raise
    compare(
        y,
        (1 - t) * a + t * b,
        [
            (t * a + (1 - t) * b, "t and 1 - t are exchanged: at t = 0 the result is to be a."),
            (a + t * b, "The factor 1 - t of a[i] is missing."),
            (a, "y is a copy of a. How much of b belongs to it?"),
        ],
    )
    return "1,024 threads, of which the last 24 have no element and leave memory alone."


@exercise
def memory(kernel: cupyops.Kernel) -> str:
    """`column_sums(x, y, rows, columns)`: y[c] is the sum of column c."""
    rows, columns = 37, 50
    x = random(rows, columns)
    faults = {
        "Uninitialized": "`y[c] += ...` reads y[c], which holds nothing yet. Add up in a variable of the thread, which "
        "begins with 0, and write y[c] once.",
        "OutOfBounds": "An index leads outside of a tensor. The element in row r and column c is x[r * columns + c]; "
        "there are more threads than columns, and a guard keeps the last ones away.",
    }
    y, profile = simulated(kernel, 1, 64, lambda y: (x, y, rows, columns), [columns], faults)
    compare(
        y,
        x.sum(0),
        [
            (
                x.flatten().view(columns, rows).sum(1),
                "These are sums of elements that lie side by side. Rows lie one after the other: from one element of a "
                "column to the next it is `columns` elements.",
            ),
            (x[0], "Only the first row was taken; a loop over the rows is missing."),
            (x[1:].sum(0), "Row 0 is missing from the sums: rows count from 0."),
            (x[:-1].sum(0), "The last row is missing from the sums."),
        ],
    )
    needed = 2 * (rows + 1)  # two warps, each of which loads every row and stores once
    if profile.total.requests > 1.5 * needed:
        raise NotYet(
            f"The sums are right, but the warps went to global memory {profile.total.requests} times where {needed} "
            "would do: y[c] is written in each pass. Add up in a variable, which lives in a register, and write y[c] "
            "after the loop."
        )
    return f"Each warp went to memory once for each row, and once for its results: {profile.total.requests} requests."


@exercise
def coalescing(kernel: cupyops.Kernel) -> str:
    """`scale_rows(x, s, y, columns)`: row r of y is s[r] times that of x; a warp for each row."""
    rows, columns = 16, 128
    x, s = random(rows, columns), random(rows, seed=1)
    try:
        y, profile = simulated(kernel, rows, 32, lambda y: (x, s, y, columns), [rows, columns])
    except NotYet as found:
        if "first of them is number 32." in str(found):
            raise NotYet(
                "Only the first 32 columns of each row were written, one by each thread. Each thread has more to do: "
                "after its first column it goes on by the number of threads, `c += blockDim.x`."
            ) from None
        raise
    compare(y, x * s[:, None], [(x * s[0], "All rows were scaled by s[0]: row r is that of block r.")])
    for (_, number), line in sorted(profile.by_line().items()):
        for counts in (profile.instructions[pc] for pc in line.instructions):
            if counts.sectors > 1.5 * counts.least_sectors:
                raise NotYet(
                    f"The values are right, but in line {number} of the cell a request of a warp touches "
                    f"{counts.sectors / counts.requests:.3g} sectors where "
                    f"{counts.least_sectors / counts.requests:.3g} would do. In one pass of the loop the elements of "
                    "neighbouring threads lie apart. Let thread t take the columns t, t + 32, t + 64 ... so that in each "
                    "pass the 32 threads read 32 neighbours."
                )
    return f"No request touches more sectors than it must: {profile.total.sectors} in all."


def diffused(x: Tensor, steps: int) -> Tensor:
    """Each inner point becomes the mean of its neighbours, `steps` times."""
    for _ in range(steps):
        x = torch.cat([x[:, :1], (x[:, :-2] + x[:, 2:]) / 2, x[:, -1:]], 1)
    return x


@exercise
def barriers(kernel: cupyops.Kernel) -> str:
    """`diffuse(x, y, steps)`: heat in rods of 128 points, a block for each."""
    rods, steps = 3, 10
    x = random(rods, 128)
    faults = {
        "Race": "Two threads meet at one point of the rod with no barrier between them. Each step needs two, which all 128 "
        "threads come to: one after everybody has read the neighbours, before anybody writes; and one after everybody has "
        "written, before the next step reads.",
        "OutOfBounds": "The points at the ends have one neighbour alone, and keep their value.",
    }
    y, _ = simulated(kernel, rods, 128, lambda y: (x, y, steps), [rods, 128], faults)
    compare(
        y,
        diffused(x, steps),
        [
            (x, "Nothing has diffused: y is x. In each step every inner point becomes the mean of its two neighbours."),
            (diffused(x, 1), "This is the rod after one step; a loop over the steps is missing."),
            (diffused(x, steps - 1), "This is the rod after steps - 1 steps; where does the loop begin and end?"),
            (diffused(x, steps + 1), "This is the rod after steps + 1 steps; where does the loop begin and end?"),
        ],
    )
    return "The steps are ordered by barriers that all 128 threads meet."


@exercise
def reductions(kernel: cupyops.Kernel) -> str:
    """`total(x, y, n)`: y[0], which is 0 before, becomes the sum of x."""
    n, blocks = 1000, 4
    x = random(n) + 0.5
    faults = {
        "OutOfBounds": "A thread reads past the end of x. A thread without an element adds 0, and still takes part.",
        "BarrierFault": "Some threads wait at a `__syncthreads()` that others do not reach. Keep it out of `if (t < "
        "step)`, and do not `return` above it: a thread without an element adds 0.",
        "Race": "Two threads meet at one place with no order between them. Within the block a `__syncthreads()` "
        "belongs into each pass of the loop; into y[0], where the blocks meet, add by `atomicAdd(y, ...)`.",
    }
    y, profile = simulated(kernel, blocks, 256, lambda y: (x, y.zero_(), n), [1], faults)
    halves = torch.cat([x, x.new_zeros(24)]).view(blocks, 256)
    compare(
        y,
        x.sum().view(1),
        [
            (x.new_zeros(1), "The total is still 0: nothing was added to y[0]."),
            (
                256 * x.sum().view(1),
                "The total is 256 times too large: all threads of a block added its sum. Thread 0 alone is to do it.",
            ),
            (
                halves[:, ::2].sum().view(1),
                "Every second element is missing: the last pass of the loop, with a step of 1, does not run.",
            ),
            (
                halves[:, 0].sum().view(1),
                "Of each block only the first element was added; the loop that halves the step is missing.",
            ),
            (halves[0].sum().view(1), "Only the first block has added its sum; thread 0 of each block is to do it."),
            (
                halves[-1].sum().view(1),
                "This is the sum of the last block: `y[0] = ...` overwrites. The blocks add by `atomicAdd(y, ...)`.",
            ),
        ],
    )
    if (atomics := executions(profile, "atom", "red")) > 8 * blocks:
        raise NotYet(
            f"The total is right, but {atomics} threads wait for one another at y[0]: atomics on one address run one "
            f"after the other. Let each block add up its elements first; then {blocks} atomics do."
        )
    return f"{atomics} atomics in place of {n}."


@exercise
def tiles(kernel: cupyops.Kernel) -> str:
    """`product(a, b, c, m, n, k)`: c = a b, by tiles of 16 x 16."""
    m, n, k = 40, 36, 24
    a, b = random(m, k), random(k, n, seed=1)
    faults = {
        "OutOfBounds": "An index leads outside of a matrix. The sizes are no multiples of 16: a thread whose element "
        "lies outside puts 0 into the tile, and one whose element of c lies outside writes nothing.",
        "Uninitialized": "The product uses an element of a tile that nobody has written. A thread whose element lies "
        "outside of the matrix puts 0 there.",
        "Race": "Two threads meet in a tile with no barrier between them. Each pass needs two: one after the tile is "
        "filled, before it is used, and one after it was used, before the next pass fills it again.",
    }
    c, profile = simulated(kernel, (3, 3), (16, 16), lambda c: (a, b, c, m, n, k), [m, n], faults)
    padded_a = torch.nn.functional.pad(a, (0, 8, 0, 8))
    padded_b = torch.nn.functional.pad(b, (0, 12, 0, 8))
    turned = padded_b.view(2, 16, 3, 16).transpose(1, 3).reshape(32, 48)
    turned_a = padded_a.view(3, 16, 2, 16).transpose(1, 3).reshape(48, 32)
    compare(
        c,
        a @ b,
        [
            (
                (padded_a @ turned)[:m, :n],
                "The tile of b is read with its row and column exchanged: this thread's column of b is "
                "b_tile[j][threadIdx.x].",
            ),
            (
                (turned_a @ padded_b)[:m, :n],
                "The tile of a is read with its row and column exchanged: this thread's row of a is a_tile[threadIdx.y][j].",
            ),
            (a[:, :16] @ b[:16], "Only the first tiles were used; a loop over k in steps of 16 is missing."),
            (
                a[:, 16:] @ b[16:],
                "Only the last tiles count: the sum begins anew in each pass. Set it to 0 before the loop.",
            ),
        ],
    )
    loads = executions(profile, "ld.global")
    if loads > 2 * 9 * 256 * 2 * 2:
        raise NotYet(
            f"The product is right, but the threads loaded {loads:,} elements from global memory where {9 * 256 * 4:,} "
            "do. Let each thread bring one element of a and one of b into the tiles, which all 256 threads then read."
        )
    return f"{loads:,} loads from global memory, where a kernel without tiles needs {2 * m * n * k:,}."


@exercise
def tensor_cores(kernel: cupyops.Kernel) -> str:
    """`product(a, b, c, k)`: c (16 x 8) = a (16 x k) times b (k x 8), b given by columns; one warp."""
    k = 48
    a, b = random(16, k).half(), random(8, k, seed=1).half()
    faults = {
        "OutOfBounds": "An index leads outside of a matrix. Row r of a begins at a[r * k], column c of b at b[c * k]; "
        "of c, row r begins at c[r * 8].",
    }
    c, profile = simulated(kernel, 1, 32, lambda c: (a, b, c, k), [16, 8], faults)
    fa, fb = a.float(), b.float()
    quarters = fa.view(2, 8, k // 16, 2, 8).permute(3, 1, 2, 0, 4).reshape(16, k)  # the second and the third exchanged
    halves = fb.view(8, k // 16, 2, 8).flip(2).reshape(8, k)
    expected = fa @ fb.t()
    compare(
        c,
        expected,
        [
            (
                quarters @ fb.t(),
                "Two parts of a are exchanged: a[1] holds the rows below (group + 8), a[2] the columns to the right "
                "(+ 8 in k).",
            ),
            (fa @ halves.t(), "The two parts of b are exchanged: b[0] holds the first 8 of k, b[1] the next 8."),
            (
                expected.roll(8, 0),
                "The halves of c are exchanged: sum[0] and sum[1] are of row group, the others of group + 8.",
            ),
            (fa[:, :16] @ fb[:, :16].t(), "Only the first 16 of k were used; a loop in steps of 16 is missing."),
            (
                fa[:, -16:] @ fb[:, -16:].t(),
                "Only the last 16 of k count: sum begins anew in each pass. Set it to 0 before the loop.",
            ),
        ],
        tolerance=1e-3,
    )
    if not executions(profile, "mma.sync"):
        raise NotYet("The product is right, but no tensor core was used: call `mma(sum, a_part, b_part)`.")
    return (
        f"{executions(profile, 'mma.sync') // 32} tensor core instructions in place of {16 * 8 * k:,} multiplications."
    )


@exercise
def gradients(kernel: cupyops.Kernel) -> str:
    """`swish_bwd(grad_y, x, grad_x, b, n)`: the gradient of y = x sigmoid(b x)."""
    n, b = 300, 1.5
    x, grad_y = 3 * random(n), random(n, seed=1)
    grad_x, _ = simulated(kernel, 2, 256, lambda y: (grad_y, x, y, b, n), [n])
    exact = x.double().requires_grad_()
    (exact * torch.sigmoid(b * exact)).backward(grad_y.double())
    assert exact.grad is not None
    s = torch.sigmoid(b * x)
    derivative = s * (1 + b * x * (1 - s))
    compare(
        grad_x,
        exact.grad.float(),
        [
            (derivative, "The factor grad_y is missing: by the chain rule grad_x = grad_y * dy/dx."),
            (grad_y * s, "One part of the product rule is missing: sigmoid(b x) depends on x, too."),
            (
                grad_y * b * x * s * (1 - s),
                "One part of the product rule is missing: the derivative of the factor x is 1.",
            ),
            (
                grad_y * s * (1 + x * (1 - s)),
                "The inner derivative is missing: that of sigmoid(b x) has the factor b.",
            ),
            (
                grad_y * s * (1 - b * x * (1 - s)),
                "A sign is wrong: the derivative of sigmoid is s (1 - s), which is never negative.",
            ),
            (grad_y * x * s, "This is grad_y times y; the gradient is grad_y times the derivative of y."),
        ],
    )
    return "The gradient is that of PyTorch in float64."
