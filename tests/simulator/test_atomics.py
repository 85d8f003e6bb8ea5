"""Atomic updates: every operation and type, in global and in shared memory, with and without the old value."""

import numpy as np
import pytest
from simulator.kit import run

from cupyops.simulator import Misaligned, OutOfBounds

RNG = np.random.default_rng(5)
N = 96

INTEGERS = {"int": np.int32, "unsigned": np.uint32, "unsigned long long": np.uint64}
OPERATIONS = {
    "Add": lambda old, value: old + value,
    "Min": min,
    "Max": max,
    "And": lambda old, value: old & value,
    "Or": lambda old, value: old | value,
    "Xor": lambda old, value: old ^ value,
    "Exch": lambda old, value: value,
}


def code_of(call, space):
    places = {
        "global": f"z[i] = {call('y + i % 5')};",
        "shared": f"""__shared__ T s[5];
            if (i < 5) s[i] = y[i];
            __syncthreads();
            z[i] = {call("s + i % 5")};
            __syncthreads();
            if (i < 5) y[i] = s[i];""",
        "unwanted": f"{call('y + i % 5')};",
        "generic": f"""__shared__ T s[5];
            if (i < 5) s[i] = y[i];
            __syncthreads();
            z[i] = {call("(i % 2 ? y : s) + i % 5")};
            __syncthreads();
            if (i < 5 && i % 2 == 0) z[96 + i] = s[i];""",
    }
    return f"""
        template <typename T> __global__ void update(const T* x, T* y, T* z) {{
            int i = threadIdx.x;
            {places[space]}
        }}
    """


def in_turn(operation, x, y, places):
    """(old values, what is left), the threads one after the other."""
    left, old = [int(value) for value in y], []
    bits = 8 * y.itemsize
    for value, place in zip(x, places):
        old.append(left[place])
        result = operation(left[place], int(value)) & ((1 << bits) - 1)
        left[place] = result - (1 << bits) if y.dtype.kind == "i" and result >> (bits - 1) else result
    return old, left


@pytest.mark.parametrize("space", ["global", "shared", "unwanted"])
@pytest.mark.parametrize("type_", INTEGERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_integers(operation, type_, space):
    code = code_of(lambda place: f"atomic{operation}({place}, x[i])", space)
    info = np.iinfo(INTEGERS[type_])
    x = RNG.integers(info.min, info.max, N, INTEGERS[type_])
    y = RNG.integers(info.min, info.max, 5, INTEGERS[type_])
    old, left = in_turn(OPERATIONS[operation], x, y, [i % 5 for i in range(N)])
    z = np.zeros_like(x)
    run(code, f"update<{type_}>", 1, N, x, y, z)
    assert y.tolist() == left
    if space != "unwanted":
        assert z.tolist() == old


def test_two_spaces_in_one_instruction():
    code = code_of(lambda place: f"atomicAdd({place}, x[i])", "generic")
    x, y, z = RNG.integers(0, 100, N).astype(np.int32), np.arange(5, dtype=np.int32), np.zeros(N + 5, np.int32)
    places = [i % 5 + 5 * (i % 2) for i in range(N)]
    old, left = in_turn(OPERATIONS["Add"], x, np.concatenate([y, y]), places)
    run(code, "update<int>", 1, N, x, y, z)
    assert y.tolist() == left[5:]
    assert z[:N].tolist() == old
    assert z[[N, N + 2, N + 4]].tolist() == [left[0], left[2], left[4]]


@pytest.mark.parametrize("operation", ["Inc", "Dec"])
def test_counting_around(operation):
    code = code_of(lambda place: f"atomic{operation}({place}, 7u)", "global")

    def step(old, _):
        if operation == "Inc":
            return 0 if old >= 7 else old + 1
        return 7 if old == 0 or old > 7 else old - 1

    y = np.array([0, 3, 7, 8, 100], np.uint32)
    old, left = in_turn(step, [7] * N, y, [i % 5 for i in range(N)])
    z = np.zeros(N, np.uint32)
    run(code, "update<unsigned>", 1, N, z.copy(), y, z)
    assert (y.tolist(), z.tolist()) == (left, old)


@pytest.mark.parametrize("type_", ["int", "unsigned long long", "unsigned short"])
def test_compare_and_swap(type_):
    """Each thread swaps when it finds the number of its turn: the first of each place does, and then the next."""
    dtype = {"int": np.int32, "unsigned long long": np.uint64, "unsigned short": np.uint16}[type_]
    code = code_of(lambda place: f"atomicCAS({place}, T(i / 10), T(i / 10 + 1))", "global")
    y, z, old, left = np.zeros(5, dtype), np.zeros(N, dtype), [], [0] * 5
    for i in range(N):
        old.append(left[i % 5])
        if left[i % 5] == i // 10:
            left[i % 5] = i // 10 + 1
    run(code, f"update<{type_}>", 1, N, z.copy(), y, z)
    assert (y.tolist(), z.tolist()) == (left, old)


@pytest.mark.parametrize("space", ["global", "shared", "unwanted"])
@pytest.mark.parametrize(("type_", "dtype"), [("float", np.float32), ("double", np.float64)])
def test_floating_sums_round_at_each_step(type_, dtype, space):
    code = code_of(lambda place: f"atomicAdd({place}, x[i])", space)
    x, y = RNG.standard_normal(N).astype(dtype), np.zeros(5, dtype)
    old, left = [], np.zeros(5, dtype)
    for i, value in enumerate(x):
        old.append(left[i % 5])
        left[i % 5] += value
    z = np.zeros_like(x)
    run(code, f"update<{type_}>", 1, N, x, y, z)
    assert (y == left).all()
    if space != "unwanted":
        assert (z == np.array(old, dtype)).all()


def test_floating_exchange():
    code = code_of(lambda place: f"atomicExch({place}, x[i])", "global")
    x, y, z = np.arange(1, N + 1, dtype=np.float32), np.zeros(5, np.float32), np.zeros(N, np.float32)
    run(code, "update<float>", 1, N, x, y, z)
    assert z.tolist() == [0.0] * 5 + x[:-5].tolist()
    assert y.tolist() == [x[i] for i in (95, 91, 92, 93, 94)]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("kind", ["__half", "__nv_bfloat16", "__half2", "__nv_bfloat162"])
def test_half_precision_sums(kind, wanted):
    """Small integers: every sum is exact in both formats."""
    import torch

    code = f"""
        #include <cuda_fp16.h>
        #include <cuda_bf16.h>
        __global__ void add(const {kind}* x, {kind}* y, {kind}* z) {{
            {"z[threadIdx.x] =" if wanted else ""} atomicAdd(y + threadIdx.x % 2, x[threadIdx.x]);
        }}
    """
    lanes = 2 if kind.endswith("2") else 1
    dtype = torch.bfloat16 if "bf" in kind else torch.float16
    values = torch.arange(1, 17 * lanes - lanes + 1).reshape(-1, lanes) % 7 - 3
    x = values.to(dtype).view(torch.int16).numpy().view(np.uint16).copy()
    y, z = np.zeros((2, lanes), np.uint16), np.zeros_like(x)
    run(code, "add", 1, len(x), x, y, z, arch="sm_90")
    result = torch.from_numpy(y.view(np.int16)).view(dtype)
    assert result.tolist() == [values[0::2].sum(0).tolist(), values[1::2].sum(0).tolist()]
    if wanted:
        old = torch.from_numpy(z.view(np.int16)).view(dtype)
        before = torch.cat([torch.zeros(2, lanes), values.float().reshape(-1, 2, lanes).cumsum(0).reshape(-1, lanes)])[
            :-2
        ]
        assert old.tolist() == before.tolist()


def test_sums_over_many_blocks_and_batches():
    code = """
        __global__ void count(int* y, int* seen) { seen[atomicAdd(y, 1)] = blockIdx.x * blockDim.x + threadIdx.x; }
    """
    y, seen = np.zeros(1, np.int32), np.full(200 * 256, -1, np.int32)
    for seed in (None, 1):
        y[0] = 0
        run(code, "count", 200, 256, y, seen, seed=seed)
        assert y[0] == 51200
        assert sorted(seen.tolist()) == list(range(51200))


def test_float_sums_in_global_memory_flush_subnormals():
    """As on a GPU; those in shared memory keep them."""
    code = """
    __global__ void sums(float* y, const float* x) {
      __shared__ float s;
      if (threadIdx.x == 0) s = 0;
      __syncthreads();
      atomicAdd(y, x[threadIdx.x]);
      atomicAdd(&s, x[threadIdx.x]);
      __syncthreads();
      if (threadIdx.x == 0) y[1] = s;
    }
    """
    x, y = np.full(4, 2.0**-140, np.float32), np.zeros(2, np.float32)
    run(code, "sums", 1, 4, y, x)
    assert y.tolist() == [0.0, 2.0**-138]


ADD_FOUR = """
extern "C" __global__ void add_four(float* y, int apart) {
  const float i = threadIdx.x;
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y + threadIdx.x % 3 * 4 + apart), "f"(i),
               "f"(2 * i), "f"(0.5f), "f"(-i) : "memory");
}
"""


def test_four_sums_side_by_side():
    """red of a vector: each of its values to its own place, by all threads."""
    y = np.ones(12, np.float32)
    run(ADD_FOUR, "add_four", 1, 32, y, 0, arch="sm_90")
    of = [np.arange(32)[np.arange(32) % 3 == place] for place in range(3)]
    right = np.array([[1 + t.sum(), 1 + 2 * t.sum(), 1 + 0.5 * t.size, 1 - t.sum()] for t in of], np.float32)
    np.testing.assert_array_equal(y.reshape(3, 4), right)


def test_sums_side_by_side_are_aligned():
    with pytest.raises(Misaligned, match="misaligned .* of 16 bytes"):
        run(ADD_FOUR, "add_four", 1, 32, np.ones(16, np.float32), 1, arch="sm_90")


def test_sums_side_by_side_stay_within():
    with pytest.raises(OutOfBounds, match="16 bytes"):
        run(ADD_FOUR, "add_four", 1, 32, np.ones(11, np.float32), 0, arch="sm_90")
