"""Launches that are refused, what a launch reports, and counts of the profile that can be checked by hand."""

import numpy as np
import pytest
from simulator.kit import fails, program, run

from cupyops.simulator import LaunchRefused, Memory, Pointer, Program, UnsupportedInstruction
from cupyops.simulator.machine import machine

BOUNDED = """
    __global__ void __launch_bounds__(64) bounded(float* y) { y[threadIdx.x] = 1.f; }
"""
SCALARS = """
    __global__ void scalars(float* y, char a, short b, int c, long long d, float e, double f, bool g) {
        y[0] = a; y[1] = b; y[2] = c; y[3] = d; y[4] = e; y[5] = f; y[6] = g;
    }
"""


def test_a_block_too_large():
    y = np.zeros(128, np.float32)
    run(BOUNDED, "bounded", 1, 64, y)
    fails(
        LaunchRefused,
        BOUNDED,
        "bounded",
        1,
        65,
        y,
        says=["a block of 65 threads", "expected at most 64, as __launch_bounds__ says"],
    )
    fails(LaunchRefused, BOUNDED, "bounded", 1, (8, 4, 4), y, says=["a block of 128 threads"])
    fails(LaunchRefused, SCALARS, "scalars", 1, 1025, *[0] * 8, says=["block (1025, 1, 1)", "at most 1024"])
    assert not y[64:].any()


@pytest.mark.parametrize(("grid", "block"), [(0, 1), (1, 0), ((1, 0), 1), (1, (1, -1))])
def test_an_empty_grid_or_block(grid, block):
    fails(LaunchRefused, BOUNDED, "bounded", grid, block, np.zeros(1, np.float32), says=["extents from 1"])


def test_the_wrong_number_of_arguments():
    fails(LaunchRefused, BOUNDED, "bounded", 1, 1, says=["0 arguments given, 1 declared"])
    fails(LaunchRefused, BOUNDED, "bounded", 1, 1, np.zeros(1, np.float32), 3, says=["2 arguments given, 1 declared"])


def test_the_wrong_size_of_an_argument():
    y = np.zeros(8, np.float32)
    given = [y, 1, 2, 3, 4, 5.0, 6.0, True]
    run(SCALARS, "scalars", 1, 1, *given)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 1, 0]
    for number, wrong in [(3, np.int64(3)), (5, np.float64(5)), (6, b"123"), (0, np.float32(1))]:
        arguments = [wrong if number == place else value for place, value in enumerate(given)]
        says = [f"argument {number} is", f"expected {[8, 1, 2, 4, 8, 4, 8, 1][number]} bytes"]
        fails(LaunchRefused, SCALARS, "scalars", 1, 1, *arguments, says=says)


def test_scalars_of_every_kind():
    y = np.zeros(8, np.float32)
    numpy = [np.int8(-1), np.int16(-2), np.int32(-3), np.int64(-4), np.float32(0.5), np.float64(0.25), np.bool_(True)]
    run(SCALARS, "scalars", 1, 1, y, *numpy)
    assert y.tolist() == [-1, -2, -3, -4, 0.5, 0.25, 1, 0]


CLUSTERED = """
    __global__ void __cluster_dims__(2, 1, 1) pairs(float* y) { y[blockIdx.x] = 1.f; }
"""


def test_a_grid_that_is_no_multiple_of_the_cluster():
    run(CLUSTERED, "pairs", 4, 1, np.zeros(8, np.float32), arch="sm_90")
    says = ["grid (3, 1, 1) is no multiple of the cluster (2, 1, 1)"]
    fails(LaunchRefused, CLUSTERED, "pairs", 3, 1, np.zeros(8, np.float32), arch="sm_90", says=says)


def test_a_kernel_that_is_not_there():
    kernels, symbol = program(BOUNDED, "bounded")
    assert kernels.kernels() == [symbol]
    with pytest.raises(LaunchRefused, match=f"no kernel other; it has {symbol}"):
        kernels.launch("other", (1,), (1,), [])


def test_an_unknown_instruction_runs_nothing():
    code = """
        __global__ void odd(unsigned* y) {
            y[0] = 1;
            if (y[1] == 7) asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], 1;" :: "l"(y));
        }
    """
    y = np.zeros(2, np.uint32)
    kernels, symbol = program(code, "odd", "sm_90")
    x = kernels.memory.allocate(y, "y")
    number = next(i.line for i in kernels.module.functions[symbol].body if getattr(i, "opcode", "") == "multimem")
    with pytest.raises(UnsupportedInstruction, match="multimem.red.relaxed.sys.global.add.u32") as caught:
        kernels.launch(symbol, (1,), (1,), [Pointer(x)])
    assert f"PTX line {number}: multimem.red" in str(caught.value)
    assert y.tolist() == [0, 0]


def test_recursion_is_refused():
    code = """
        __device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
        __global__ void recursive(int* y) { y[0] = fib(y[1]); }
    """
    with pytest.raises(UnsupportedInstruction, match=r"recursive calls \(\w*fib\w*\) are not covered"):
        run(code, "recursive", 1, 1, np.zeros(2, np.int32))


def test_a_function_pointer_of_which_both_functions_are_kept_apart():
    code = """
        __device__ __noinline__ int one(int n) { return n + 1; }
        __device__ __noinline__ int two(int n) { return n * 2; }
        __global__ void indirect(int* y) {
            int (*f)(int) = y[0] ? one : two;
            y[1] = f(y[2]);
        }
    """
    for chosen, expected in [(1, 8), (0, 14)]:
        y = np.array([chosen, 0, 7], np.int32)
        run(code, "indirect", 1, 1, y)
        assert y[1] == expected


def test_two_programs_share_a_memory():
    memory = Memory()
    kernels, symbol = program(BOUNDED, "bounded")
    kernels.memory = memory
    y = memory.allocate(np.zeros(4, np.float32), "y")
    kernels.launch(symbol, (1,), (4,), [Pointer(y)])
    assert y.buffer.view(np.float32).tolist() == [1.0] * 4


def test_a_pointer_into_an_allocation():
    kernels, symbol = program(BOUNDED, "bounded")
    y = kernels.memory.allocate(np.zeros(8, np.float32), "y")
    kernels.launch(symbol, (1,), (4,), [Pointer(y, 12)])
    assert y.buffer.view(np.float32).tolist() == [0.0] * 3 + [1.0] * 4 + [0.0]


def test_thread_and_block_numbers():
    code = """
        __global__ void where(uint3* y) {
            int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
            int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
            int i = 2 * (block * blockDim.x * blockDim.y * blockDim.z + thread);
            y[i] = threadIdx;
            y[i + 1] = blockIdx;
        }
    """
    grid, block = (3, 2, 4), (5, 3, 2)
    expected = [
        [[tx, ty, tz], [bx, by, bz]]
        for bz in range(4) for by in range(2) for bx in range(3)
        for tz in range(2) for ty in range(3) for tx in range(5)
    ]  # fmt: skip
    for seed in (None, 1):
        y = np.zeros((24 * 30, 2, 3), np.uint32)
        run(code, "where", grid, block, y, seed=seed)
        assert y.tolist() == expected


def test_progress_and_report(monkeypatch):
    monkeypatch.setattr(machine, "_THREADS_PER_BATCH", 128)
    seen = []
    code = "__global__ void fill(float* y) { y[blockIdx.x * blockDim.x + threadIdx.x] = 1.f; }"
    y = np.zeros(5 * 64, np.float32)
    report = run(code, "fill", 5, 64, y, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert (report.kernel, report.grid, report.block) == ("fill", (5, 1, 1), (64, 1, 1))
    assert report.thread_instructions % 320 == 0 and report.issued * 320 == report.thread_instructions * 3
    assert report.profile is None and report.steps >= 3


# --- the profile ---


def stores(code, name, grid, block, *args, space, **options):
    """The counts of the one store into that memory."""
    profile = run(code, name, grid, block, *args, profile=True, **options).profile
    (found,) = [
        profile.instructions[pc]
        for pc, instruction in enumerate(profile.listing.instructions)
        if instruction.opcode == "st" and space in instruction.modifiers
    ]
    return found


@pytest.mark.parametrize(
    ("type_", "index", "sectors", "least"),
    [
        ("float", "i", 4, 4),  # 32 x 4 bytes side by side
        ("float", "i + 1", 5, 4),  # the same, 4 bytes off
        ("float", "2 * i", 8, 4),
        ("float", "8 * i", 32, 4),  # a sector each
        ("float", "0", 1, 1),
        ("float", "31 - i", 4, 4),
        ("float4", "i", 16, 16),
        ("double", "2 * i", 16, 8),
        ("char", "i", 1, 1),
        ("char", "i + 16", 2, 1),
    ],
)
def test_sectors_of_a_request(type_, index, sectors, least):
    code = f"""
        __global__ void touch({type_}* x) {{
            int i = threadIdx.x;
            x[{index}] = {type_}();
        }}
    """
    found = stores(code, "touch", 1, 32, np.zeros(2048, np.int8), space="global")
    assert (found.requests, found.sectors, found.least_sectors) == (1, sectors, least)
    warps = code.replace("int i = threadIdx.x", "int i = threadIdx.x % 32")
    four = stores(warps, "touch", 2, 64, np.zeros(2048, np.int8), space="global")
    assert (four.requests, four.sectors) == (4, 4 * sectors)


@pytest.mark.parametrize(
    ("type_", "index", "wavefronts", "least"),
    [
        ("float", "i", 1, 1),
        ("float", "2 * i", 2, 1),
        ("float", "32 * i", 32, 1),
        ("float", "33 * i", 1, 1),
        ("float", "i / 32", 1, 1),  # one word for all
        ("float", "i % 2 * 32", 2, 1),  # two words of one bank
        ("float4", "i", 4, 4),
        ("double", "i", 2, 2),
        ("double", "16 * i", 32, 2),
        ("char", "i", 1, 1),
    ],
)
def test_bank_conflicts(type_, index, wavefronts, least):
    code = f"""
        __global__ void touch(float* y) {{
            extern __shared__ __align__(16) char bytes[];
            volatile {type_}* s = reinterpret_cast<{type_}*>(bytes);
            int i = threadIdx.x;
            VALUE;
            y[i] = 1.f;
        }}
    """
    if type_ == "float4":
        code = code.replace("volatile ", "").replace("VALUE", f"s[{index}] = make_float4(1.f, 2.f, 3.f, 4.f)")
    else:
        code = code.replace("VALUE", f"s[{index}] = 1")
    found = stores(code, "touch", 1, 32, np.zeros(32, np.float32), shared=4 * 33 * 32, space="shared")
    assert (found.shared_requests, found.wavefronts, found.least_wavefronts) == (1, wavefronts, least)


def test_divergence():
    """Of each warp 8 lanes take the branch, in 3 of 4 warps."""
    code = """
        __global__ void branch(volatile int* y) {
            int i = threadIdx.x;
            if (i % 4 == 1 && i >= 32) {
                y[i] = 1;
            }
        }
    """
    report = run(code, "branch", 1, 128, np.zeros(128, np.int32), profile=True)
    found = [
        report.profile.instructions[pc]
        for pc, instruction in enumerate(report.profile.listing.instructions)
        if instruction.opcode == "st"
    ]
    assert [(counts.warps, counts.threads) for counts in found] == [(3, 24)]
    first = report.profile.instructions[0]
    assert (first.warps, first.threads) == (4, 128)


def test_a_required_block_is_required():
    """`.reqntid`, as `__block_size__` writes it: any other block is refused, be it as large."""
    text = Program(".version 8.0\n.target sm_80\n.address_size 64\n.entry fixed() .reqntid 8, 4 { ret; }")
    text.launch("fixed", (1,), (8, 4), [])
    for block in ((32,), (4, 8), (8, 4, 2)):
        with pytest.raises(LaunchRefused, match=r"the kernel requires \(8, 4, 1\)"):
            text.launch("fixed", (1,), block, [])
