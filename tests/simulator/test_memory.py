"""Bounds, alignment and what was never written, in every memory; the message names the thread, the place and the line."""

import numpy as np
import pytest
from simulator.kit import Empty, fails, launch, parameter_names, program, run

from cupyops.simulator import Misaligned, OutOfBounds, Pointer, Uninitialized

READ_AT = """
    __global__ void read_at(const int* x, int* y, long long at) {
        y[threadIdx.x] = x[threadIdx.x + at];  // here
    }
"""
WRITE_AT = """
    __global__ void write_at(int* y, long long at) {
        y[threadIdx.x + at] = 1;  // here
    }
"""
BYTES_AT = """
    template <typename T> __global__ void bytes_at(char* x, long long at) {
        *reinterpret_cast<T*>(x + at) = T();  // here
    }
"""


def ints(n):
    return np.arange(n, dtype=np.int32)


def test_an_access_within_bounds_is_done():
    y = np.zeros(4, np.int32)
    run(READ_AT, "read_at", 1, 4, ints(12), y, 8)
    assert y.tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (9, ["thread (3,0,0) of block (0,0,0)", "offset 48: just past the end of `x` (48 bytes)"]),
        (12, ["thread (0,0,0) of block (0,0,0), and 3 more threads", "offset 48: just past"]),
        (1000, ["offset 4000: 3952 bytes past the end of `x`"]),
        (-1, ["thread (0,0,0) of block (0,0,0)\n", "offset -4: 4 bytes before the start of `x` (48 bytes)"]),
        (-100, ["offset -400: 400 bytes before the start of `x`"]),
    ],
)
def test_a_read_outside(at, says):
    fails(OutOfBounds, READ_AT, "read_at", 1, 4, ints(12), ints(4), at, says=["read of 4 bytes outside `x`", *says])


def test_a_read_a_little_before_an_array_is_told_by_it():
    """And not as a terabyte behind the one whose addresses end there."""
    code = """
        __global__ void two(const int* a, const int* b, int* y, int at) {
            y[threadIdx.x] = a[threadIdx.x] + (b + at)[threadIdx.x];
        }
    """
    says = ["read of 4 bytes outside `b`", "offset -4: 4 bytes before the start of `b` (16 bytes)"]
    fails(OutOfBounds, code, "two", 1, 4, ints(4), ints(4), ints(4), -1, says=says)


def test_a_write_outside_names_the_block_and_leaves_the_array():
    code = """
        __global__ void fill(float* y, int n) {
            int i = blockIdx.y * blockDim.x + threadIdx.x;
            if (i <= n) y[i] = 1.f;  // here
        }
    """
    y = np.zeros(10, np.float32)
    says = ["write of 4 bytes outside `y`", "thread (2,0,0) of block (0,2,0)\n", "offset 40: just past the end of `y`"]
    fails(OutOfBounds, code, "fill", (1, 3), 4, y, 10, says=says)


@pytest.mark.parametrize(("type_", "width"), [("float2", 8), ("float4", 16)])
def test_an_access_across_the_end(type_, width):
    x = np.zeros(2 * width - 4, np.int8)
    says = [
        f"write of {width} bytes outside `x`",
        f"offset {width}: across the end, {width - 4} bytes before it, of `x`",
    ]
    says = says if width == 8 else ["write of", "across the end"]
    fails(OutOfBounds, BYTES_AT, f"bytes_at<{type_}>", 1, 1, x, width, says=says)


def test_an_access_across_the_start():
    fails(OutOfBounds, WRITE_AT, "write_at", 1, 2, ints(4), -1, says=["4 bytes before the start of `y`"])


def test_a_null_pointer():
    says = ["read of 4 bytes through a null pointer", "address 0x0"]
    fails(OutOfBounds, READ_AT, "read_at", 1, 1, None, ints(4), 0, says=says)
    fails(OutOfBounds, WRITE_AT, "write_at", 1, 4, None, 2, says=["write of 4 bytes through a null pointer", "0x8"])


def test_a_wild_pointer():
    says = ["write of 4 bytes through a wild pointer", "address 0x123456789abc0"]
    fails(OutOfBounds, WRITE_AT, "write_at", 1, 1, 0x123456789ABC0, 0, says=says)


def test_a_pointer_into_shared_memory_of_nobody():
    fails(OutOfBounds, WRITE_AT, "write_at", 1, 1, 0xF << 60, 0, says=["wild pointer"])


def test_freed_memory():
    kernels, symbol = program(READ_AT, "read_at")
    x = kernels.memory.allocate(ints(4), "x")
    y = kernels.memory.allocate(ints(4), "y")
    kernels.memory.free(x)
    with pytest.raises(OutOfBounds, match="wild pointer"):
        kernels.launch(symbol, (1,), (4,), [Pointer(x), Pointer(y), 0])


def test_neighbours_in_one_storage():
    """Two views of one storage: each launch may touch its own part only."""
    kernels, symbol = program(READ_AT, "read_at")
    storage = kernels.memory.allocate(ints(16), "x")
    y = kernels.memory.allocate(np.zeros(4, np.int32), "y")

    def read(at):
        kernels.launch(symbol, (1,), (4,), [Pointer(storage, 16), Pointer(y), at], label="read_at")

    storage.restrict(16, 48)
    read(0)
    assert y.buffer.view(np.int32).tolist() == [4, 5, 6, 7]
    read(4)
    with pytest.raises(OutOfBounds, match=r"offset 32: just past the end of `x` \(32 bytes\)"):
        read(5)
    with pytest.raises(OutOfBounds, match=r"offset -4: 4 bytes before the start of `x` \(32 bytes\)"):
        read(-1)


@pytest.mark.parametrize(("type_", "width", "at"), [("short", 2, 1), ("int", 4, 2), ("double", 8, 4), ("int4", 16, 8)])
def test_misaligned_global(type_, width, at):
    says = [f"misaligned write of {min(width, 16)} bytes in global memory", f"is no multiple of {width}"]
    fails(Misaligned, BYTES_AT, f"bytes_at<{type_}>", 1, 1, np.zeros(64, np.int8), at, says=says)


def test_misaligned_names_the_threads():
    code = """
        __global__ void odd(const char* x, int* y) {
            y[threadIdx.x] = *reinterpret_cast<const int*>(x + 3 * threadIdx.x);  // here
        }
    """
    x, y = np.zeros(64, np.int8), np.zeros(8, np.int32)
    says = ["misaligned read of 4 bytes", "thread (1,0,0) of block (0,0,0), and 5 more threads"]
    fails(Misaligned, code, "odd", 1, 8, x, y, says=says)


# --- shared and local memory ---

SHARED_AT = """
    __global__ void shared_at(int* y, int at) {
        __shared__ int s[8];
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        y[threadIdx.x] = s[threadIdx.x + at];  // here
    }
"""


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (1, ["thread (7,0,0)", "offset 32: just past the end of the block's shared memory (32 bytes)"]),
        (-2, ["thread (0,0,0) of block (1,0,0), and 1 more threads", "offset -8: 8 bytes before the start"]),
    ],
)
def test_shared_outside(at, says):
    code = SHARED_AT.replace("threadIdx.x + at", "int(threadIdx.x) + (blockIdx.x == 1 ? at : 0)")
    says = ["read of 4 bytes outside the block's shared memory", "of block (1,0,0)", *says]
    fails(OutOfBounds, code, "shared_at", 3, 8, ints(8), at, says=says)


def test_shared_outside_by_an_address_of_32_bits():
    code = """
        __global__ void narrow(int* y, int at) {
            __shared__ int s[8];
            s[threadIdx.x] = threadIdx.x;
            __syncthreads();
            unsigned a = __cvta_generic_to_shared(s) + 4 * at;
            int v;
            asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(a));  // here
            y[threadIdx.x] = v;
        }
    """
    y = ints(8)
    run(code, "narrow", 1, 8, y, 5)
    assert y.tolist() == [5] * 8
    fails(OutOfBounds, code, "narrow", 1, 8, y, -1, says=["offset -4: 4 bytes before the start of the block's shared"])
    fails(OutOfBounds, code, "narrow", 1, 8, y, 9, says=["offset 36: 4 bytes past the end of the block's shared"])


def test_dynamic_shared_memory_ends_where_the_launch_says():
    code = """
        extern __shared__ float buffer[];
        __global__ void dynamic(float* y) {
            __shared__ float fixed[4];
            if (threadIdx.x < 4) fixed[threadIdx.x] = 100.f;
            buffer[threadIdx.x] = threadIdx.x;  // here
            __syncthreads();
            y[threadIdx.x] = buffer[threadIdx.x] + fixed[threadIdx.x % 4];
        }
    """
    y = np.zeros(32, np.float32)
    run(code, "dynamic", 1, 32, y, shared=128)
    assert y.tolist() == [100.0 + i for i in range(32)]
    says = ["thread (31,0,0)", "(124 bytes)"]
    fails(OutOfBounds, code, "dynamic", 1, 32, y, shared=124, says=says)


def test_misaligned_shared():
    code = """
        __global__ void odd(int* y, int at) {
            __shared__ char s[64];
            s[threadIdx.x] = 1;
            __syncthreads();
            y[threadIdx.x] = *reinterpret_cast<volatile int*>(s + at);  // here
        }
    """
    says = ["misaligned read of 4 bytes in shared memory", "thread (0,0,0)"]
    fails(Misaligned, code, "odd", 1, 64, ints(64), 6, says=says)


LOCAL = """
    __global__ void local(int* y, int n) {
        int a[16];
        for (int i = 0; i < 16; i++) a[i] = threadIdx.x * 100 + i * i;
        for (int i = 0; i < n; i++) a[(a[i] + threadIdx.x) % 16] += i;
        y[threadIdx.x] = a[n + threadIdx.x % 2];  // here
    }
"""


def test_local_arrays_with_a_dynamic_index():
    y, expected = np.zeros(40, np.int32), []
    run(LOCAL, "local", 1, 40, y, 7)
    for thread in range(40):
        a = [thread * 100 + i * i for i in range(16)]
        for i in range(7):
            a[(a[i] + thread) % 16] += i
        expected.append(a[7 + thread % 2])
    assert y.tolist() == expected


def test_local_outside():
    code = LOCAL.replace("a[n + threadIdx.x % 2]", "a[n * (threadIdx.x == 5)]")
    says = ["read of 4 bytes outside the thread's local memory", "thread (5,0,0) of block (0,0,0)", "(64 bytes)"]
    fails(OutOfBounds, code, "local", 1, 8, ints(8), 16, says=["offset 64: just past", *says])
    fails(OutOfBounds, code, "local", 1, 8, ints(8), -1, says=["offset -4: 4 bytes before", *says])


def test_misaligned_local():
    code = """
        __global__ void odd(double* y, int at) {
            int a[16];
            for (int i = 0; i < 16; i++) a[(i * 3 + at) % 16] = i;
            y[threadIdx.x] = *reinterpret_cast<double*>(a + at);  // here
        }
    """
    says = ["misaligned read of 8 bytes in local memory", "is no multiple of 8"]
    fails(Misaligned, code, "odd", 1, 2, np.zeros(2), 3, says=says)


# --- atomics ---


@pytest.mark.parametrize("call", ["atomicAdd(y + at, 1)", "y[0] = atomicCAS(y + at, 0, 1)", "atomicExch(y + at, 1)"])
def test_atomics_outside(call):
    code = f"""
        __global__ void update(int* y, int at) {{
            {call};  // here
        }}
    """
    says = ["atomic update of 4 bytes outside `y`", "offset 16: just"]
    fails(OutOfBounds, code, "update", 1, 1, ints(4), 4, says=says)
    fails(OutOfBounds, code, "update", 1, 1, None, 1, says=["atomic update of 4 bytes through a null pointer"])


def test_atomics_misaligned():
    code = """
        __global__ void update(char* y, int at) {
            atomicAdd(reinterpret_cast<unsigned long long*>(y + at), 1ull);  // here
        }
    """
    fails(Misaligned, code, "update", 1, 1, np.zeros(64, np.int8), 4, says=["misaligned atomic update of 8 bytes"])


def test_atomics_outside_shared():
    code = """
        __global__ void update(int* y, int at) {
            __shared__ int s[4];
            s[threadIdx.x] = 0;
            __syncthreads();
            atomicAdd(s + at, 1);  // here
            __syncthreads();
            y[threadIdx.x] = s[threadIdx.x];
        }
    """
    says = ["atomic update of 4 bytes outside the block's shared memory", "offset 16: just past"]
    fails(OutOfBounds, code, "update", 1, 4, ints(4), 4, says=says)


# --- what was never written ---


def test_shared_memory_that_nobody_has_written():
    code = """
        __global__ void half(int* y) {
            __shared__ int s[32];
            if (threadIdx.x < 16) s[threadIdx.x] = 1;
            __syncthreads();
            y[threadIdx.x] = s[threadIdx.x];  // here
        }
    """
    says = [
        "read of shared memory that was never written",
        "thread (16,0,0) of block (0,0,0), and 31 more",
        "offset 64",
    ]
    fails(Uninitialized, code, "half", 2, 32, ints(32), says=says)
    run(code, "half", 2, 32, ints(32), check=False)


def test_an_atomic_on_shared_memory_that_nobody_has_written():
    code = """
        __global__ void count(int* y) {
            __shared__ int n;
            atomicAdd(&n, 1);  // here
            __syncthreads();
            y[0] = n;
        }
    """
    fails(Uninitialized, code, "count", 1, 32, ints(1), says=["read of shared memory that was never written"])


def test_shared_memory_does_not_outlive_its_block():
    code = """
        __global__ void once(int* y) {
            __shared__ volatile int s;
            if (blockIdx.x == 0) s = 1;
            y[blockIdx.x] = s;  // here
        }
    """
    fails(Uninitialized, code, "once", 2, 1, ints(2), says=["thread (0,0,0) of block (1,0,0)"])


def test_global_memory_that_nothing_has_written():
    y = np.zeros(4, np.int32)
    says = ["read of `x` where nothing was written", "offset 8 of `x` (48 bytes)", "and 3 more threads"]
    fails(Uninitialized, READ_AT, "read_at", 1, 4, Empty(ints(12)), y, 2, says=says)
    run(READ_AT, "read_at", 1, 4, Empty(ints(12)), y, 2, check=False)


def test_only_the_part_that_was_not_written_counts():
    code = """
        __global__ void part(float4* x, float* y) {
            float* flat = reinterpret_cast<float*>(x);
            if (threadIdx.x != 5) flat[threadIdx.x] = 1.f;
            __syncthreads();
            float4 v = x[threadIdx.x % 2];  // here
            y[threadIdx.x] = v.x + v.w;
        }
    """
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    says = ["thread (1,0,0)", "and 3 more threads", "offset 20 of `x` (32 bytes)"]
    fails(Uninitialized, code, "part", 1, 8, Empty(x), y, says=says)
    run(code.replace("threadIdx.x != 5", "true"), "part", 1, 8, Empty(x), y)
    assert y.tolist() == [2.0] * 8


def test_atomics_on_global_memory_that_nothing_has_written():
    code = """
        __global__ void add(float* y) {
            atomicAdd(y + threadIdx.x, 1.f);  // here
        }
    """
    fails(
        Uninitialized, code, "add", 1, 4, Empty(np.zeros(4, np.float32)), says=["read of `y` where nothing was written"]
    )


TWO_KERNELS = """
    __global__ void produce(int* x, int n) {
        if (threadIdx.x < n) x[threadIdx.x] = threadIdx.x;
    }
    __global__ void consume(const int* x, int* y) {
        y[threadIdx.x] = x[threadIdx.x];
    }
"""


@pytest.mark.parametrize("outside", [False, True])
def test_memory_written_by_an_earlier_kernel_or_from_outside(outside):
    kernels, produce = program(TWO_KERNELS, "produce")
    _, consume = program(TWO_KERNELS, "consume")
    consumers, _ = program(TWO_KERNELS, "consume")
    consumers.memory = kernels.memory
    array = np.zeros(8, np.int32)
    x = kernels.memory.allocate(array, "x", initialized=False)
    y = kernels.memory.allocate(np.zeros(8, np.int32), "y")
    kernels.launch(produce, (1,), (8,), [Pointer(x), 6])
    if outside:
        array[6:] = [60, 70]
        consumers.launch(consume, (1,), (8,), [Pointer(x), Pointer(y)])
        assert y.buffer.view(np.int32).tolist() == [0, 1, 2, 3, 4, 5, 60, 70]
    else:
        with pytest.raises(Uninitialized, match=r"thread \(6,0,0\) of block \(0,0,0\), and 1 more threads"):
            consumers.launch(consume, (1,), (8,), [Pointer(x), Pointer(y)])


# --- values ---


@pytest.mark.parametrize(
    ("type_", "dtype"),
    [
        ("signed char", np.int8), ("unsigned char", np.uint8), ("short", np.int16), ("unsigned short", np.uint16),
        ("int", np.int32), ("unsigned", np.uint32), ("long long", np.int64), ("unsigned long long", np.uint64),
        ("float", np.float32), ("double", np.float64),
    ],
)  # fmt: skip
def test_every_type_is_loaded_and_stored(type_, dtype):
    """Narrow integers are widened with their sign."""
    code = "template <typename T> __global__ void widen(const T* x, T* y, double* z) { T v = x[threadIdx.x];"
    code += "y[threadIdx.x] = v; z[threadIdx.x] = v; }"
    edges = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    x = np.array([edges.min, edges.max, 0, 1, 100, 77], dtype)
    y, z = np.zeros_like(x), np.zeros(6)
    run(code, f"widen<{type_}>", 1, 6, x, y, z)
    assert y.tolist() == x.tolist()
    assert z.tolist() == x.astype(np.float64).tolist()


@pytest.mark.parametrize("type_", ["char2", "short4", "int2", "int4", "double2", "longlong2", "uchar4"])
def test_vectors_are_loaded_and_stored(type_):
    code = "template <typename T> __global__ void reverse(const T* x, T* y) {"
    code += "y[threadIdx.x] = x[blockDim.x - 1 - threadIdx.x]; }"
    size = {"char2": 2, "short4": 8, "int2": 8, "int4": 16, "double2": 16, "longlong2": 16, "uchar4": 4}[type_]
    x = np.random.default_rng(0).integers(0, 256, (5, size)).astype(np.uint8)
    y = np.zeros_like(x)
    run(code, f"reverse<{type_}>", 1, 5, x, y)
    assert (y == x[::-1]).all()


def test_generic_addresses_of_every_space_in_one_instruction():
    code = """
        __device__ int table[8] = {70, 71, 72, 73, 74, 75, 76, 77};
        __global__ void anywhere(const int* x, int* y) {
            __shared__ int s[32];
            int own[4];
            for (int i = 0; i < 4; i++) own[(i + threadIdx.x) % 4] = 1000 * i;
            s[threadIdx.x] = 500 + threadIdx.x;
            __syncthreads();
            int t = threadIdx.x;
            const int* p = t % 4 == 0 ? x + t : t % 4 == 1 ? s + t : t % 4 == 2 ? own + (t / 4) % 4 : table + t % 8;
            y[t] = *p;
            int* q = t % 2 ? s + t : y + 32 + t;
            *q = -t;
            y[64 + t] = t % 2 ? s[t] : y[32 + t];
        }
    """
    x, y = np.arange(100, 132, dtype=np.int32), np.zeros(96, np.int32)
    run(code, "anywhere", 1, 32, x, y)
    for t in range(32):
        own = {(i + t) % 4: 1000 * i for i in range(4)}
        assert y[t] == [100 + t, 500 + t, own[t // 4 % 4], 70 + t % 8][t % 4]
    assert y[64:].tolist() == [-t for t in range(32)]


def test_variables_of_the_module():
    code = """
        __constant__ float weights[4] = {0.5f, 1.5f, -2.f, 4.f};
        __device__ int counter = 40;
        __device__ int* pointer = &counter;
        __global__ void use(float* y) {
            y[threadIdx.x] = weights[threadIdx.x % 4];
            if (threadIdx.x == 0) { *pointer += 2; y[8] = counter; }
        }
    """
    loaded = program(code, "use")
    y = np.zeros(9, np.float32)
    launch(loaded, parameter_names(code, "use"), 1, 8, y)
    assert y.tolist() == [0.5, 1.5, -2.0, 4.0] * 2 + [42.0]
    launch(loaded, ["y"], 1, 8, y)
    assert y[8] == 44.0
    loaded[0].variables["weights"].buffer.view(np.float32)[:] = [1, 2, 3, 4]
    launch(loaded, ["y"], 1, 8, y)
    assert y[:4].tolist() == [1.0, 2.0, 3.0, 4.0]


# --- one array of several ---


def test_past_a_static_array_into_dynamic_memory():
    code = """
        extern __shared__ int more[];
        __global__ void both(int* y, int i) {
            __shared__ int own[32];
            own[threadIdx.x] = more[threadIdx.x] = threadIdx.x;
            __syncthreads();
            y[threadIdx.x] = own[threadIdx.x + i] + more[threadIdx.x + i];  // here
        }
    """
    run(code, "both", 1, 32, ints(32), 0, shared=128)
    fails(OutOfBounds, code, "both", 1, 32, ints(32), 1, shared=256, says=["just past the end of `own`"])


def test_memory_of_the_block_is_as_large_as_the_gpu_has_it():
    code = """
        extern __shared__ int more[];
        __global__ void both(int* y) {
            __shared__ int a[3], b[5];
            a[threadIdx.x % 3] = b[threadIdx.x % 5] = more[0] = 1;
            y[threadIdx.x] = a[y[0]] + b[y[0]];
            asm("mov.u32 %0, %%total_smem_size;" : "=r"(y[0]));
        }
    """
    y = ints(1)
    run(code, "both", 1, 1, y, shared=64)
    assert y[0] == 12 + 20 + 64
