"""Patterns that courses and libraries teach, each right and with one piece of it wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import BarrierFault, Deadlock, Misaligned, OutOfBounds, Race, SimulatorError, Uninitialized


class Pattern(NamedTuple):
    """A kernel, in which PIECE stands for the piece that is right or wrong.

    Attributes:
        made: a fresh list of its arguments.
        expected: what its last argument holds afterwards, as far as it is listed.
        always: whether every order of the blocks shows the mutant's fault.
    """

    code: str
    right: str
    wrong: str
    kind: type[SimulatorError]
    says: str
    made: Callable[[], list[Any]]
    expected: list[float]
    grid: int = 1
    block: int | tuple[int, int] = 64
    arch: str = "sm_80"
    always: bool = True


def ints(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.int32)


def counted(count: int = 64) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


PATTERNS = {
    "a histogram in shared memory": Pattern(
        """
        __global__ void f(const int* x, int* y) {
            __shared__ int bins[8];
            if (threadIdx.x < 8) bins[threadIdx.x] = 0;
            __syncthreads();
            PIECE;
            __syncthreads();
            if (threadIdx.x < 8) y[threadIdx.x] = bins[threadIdx.x];
        }
        """,
        "atomicAdd(&bins[x[threadIdx.x] % 8], 1)",
        "bins[x[threadIdx.x] % 8]++",
        Race,
        "write shared memory that another thread has read",
        lambda: [counted(), ints()],
        [8] * 8,
    ),
    "a scan in place": Pattern(
        """
        __global__ void f(const int* x, int* y) {
            __shared__ int s[64];
            int t = threadIdx.x;
            s[t] = x[t];
            __syncthreads();
            for (int by = 1; by < 64; by *= 2) {
                int v = t >= by ? s[t - by] : 0;
                PIECE
                s[t] += v;
                __syncthreads();
            }
            y[t] = s[t];
        }
        """,
        "__syncthreads();",
        "",
        Race,
        "with no barrier in between",
        lambda: [counted(), ints()],
        [0, 1, 3, 6, 10],
    ),
    "two buffers and one barrier a round": Pattern(
        """
        __global__ void f(const int* x, int* y) {
            __shared__ int s[2][64];
            int t = threadIdx.x, sum = 0;
            for (int i = 0; i < 6; i++) {
                s[PIECE][t] = x[(t + i) % 64];
                __syncthreads();
                sum += s[PIECE][63 - t];
            }
            y[t] = sum;
        }
        """,
        "i % 2",
        "0",
        Race,
        "write shared memory that another thread has read",
        lambda: [counted(), ints()],
        [sum((63 + i) % 64 for i in range(6))],
    ),
    "a butterfly of one warp": Pattern(
        """
        __global__ void f(int* y) {
            __shared__ int s[64];
            int t = threadIdx.x;
            s[t] = t;
            s[t + 32] = t + 32;
            for (int h = 1; h < 64; h *= 2) {
                PIECE
                int i = t / h * 2 * h + t % h, a = s[i], b = s[i + h];
                s[i] = a + b;
                s[i + h] = a - b;
            }
            __syncwarp();
            y[t] = s[t];
        }
        """,
        "__syncwarp();",
        "",
        Race,
        "with no barrier in between",
        lambda: [ints()],
        [2016, -32, -64, 0, -128],
        block=32,
    ),
    "an odd-even sort until nothing is swapped": Pattern(
        """
        __global__ void f(int* y) {
            __shared__ int s[64];
            int t = threadIdx.x;
            s[t] = 63 - t;
            __syncthreads();
            bool swapped;
            do {
                swapped = false;
                for (int first = 0; first < 2; first++) {
                    int i = t + first;
                    if (t % 2 == 0 && i + 1 < 64 && s[i] > s[i + 1]) {
                        int a = s[i];
                        s[i] = s[i + 1];
                        s[i + 1] = a;
                        swapped = true;
                    }
                    PIECE
                }
            } while (__syncthreads_or(swapped));
            y[t] = s[t];
        }
        """,
        "__syncthreads();",
        "",
        Race,
        "with no barrier in between",
        lambda: [ints()],
        list(range(64)),
    ),
    "a block of two dimensions": Pattern(
        """
        __global__ void f(const int* x, int* y) {
            __shared__ int s[64];
            int t = threadIdx.y * 32 + threadIdx.x, at = PIECE;
            s[at] = x[t];
            __syncthreads();
            y[t] = s[at];
        }
        """,
        "t",
        "threadIdx.x",
        Race,
        "threads of one instruction write different values to one place",
        lambda: [counted(), ints()],
        list(range(64)),
        block=(32, 2),
    ),
    "two arrays in dynamic shared memory": Pattern(
        """
        __global__ void f(int* y) {
            __shared__ char raw[512];
            int *a = (int*)raw, *b = (int*)(raw + PIECE), t = threadIdx.x;
            a[t] = t;
            b[t] = 7;
            __syncthreads();
            y[t] = a[63 - t] + b[63 - t];
        }
        """,
        "blockDim.x * sizeof(int)",
        "blockDim.x * 2",
        Race,
        "write shared memory that another thread has written",
        lambda: [ints()],
        [70, 69, 68],
    ),
    "a hash table that a block fills and asks": Pattern(
        """
        __global__ void f(unsigned long long* table, int* value, int* y) {
            int i = threadIdx.x;
            unsigned long long key = 7919ull * i + 1;
            unsigned at = key * 2654435761u % 128;
            for (;; at = (at + 1) % 128)
                if (atomicCAS(table + at, 0ull, key) == 0) {
                    value[at] = i;
                    break;
                }
            PIECE
            at = (7919ull * (63 - i) + 1) * 2654435761u % 128;
            while (table[at] != 7919ull * (63 - i) + 1) at = (at + 1) % 128;
            y[i] = value[at];
        }
        """,
        "__syncthreads();",
        "__syncwarp();",
        Race,
        "race within a block: read `table`",
        lambda: [np.zeros(128, np.uint64), ints(128), ints()],
        list(range(63, -1, -1)),
    ),
    "bytes beside each other": Pattern(
        """
        __global__ void f(unsigned char* y) {
            unsigned i = threadIdx.x, *word = (unsigned*)y + i / 4, by = i % 4 * 8;
            PIECE;
        }
        """,
        "y[i] = i",
        "*word = (*word & ~(255u << by)) | i << by",
        Race,
        "race within a block: write `y`",
        lambda: [np.zeros(64, np.uint8)],
        list(range(64)),
    ),
    "a look-back over blocks": Pattern(
        """
        __global__ void f(const int* x, volatile int* sum, volatile int* flag, int* next, int* y) {
            __shared__ int block, before;
            if (threadIdx.x == 0) block = atomicAdd(next, 1);
            __syncthreads();
            int b = block, t = threadIdx.x, v = x[b * 32 + t];
            for (int by = 1; by < 32; by *= 2) {
                int low = __shfl_up_sync(0xffffffff, v, by);
                if (t >= by) v += low;
            }
            int all = __shfl_sync(0xffffffff, v, 31);
            if (t == 0) {
                before = 0;
                if (b) {
                    while (flag[b - 1] == 0) {}
                    __threadfence();
                    before = ((int*)sum)[b - 1];
                }
                ((int*)sum)[b] = before + all;
                PIECE
                flag[b] = 1;
            }
            __syncthreads();
            y[b * 32 + t] = before + v;
        }
        """,
        "__threadfence();",
        "",
        Race,
        "race between blocks: read `sum` where another block has written",
        lambda: [counted(128), ints(4), ints(4), ints(1), ints(128)],
        np.cumsum(np.arange(128)).tolist(),
        grid=4,
        block=32,
    ),
    "a lock that is given by tickets": Pattern(
        """
        __global__ void f(unsigned* next, volatile unsigned* serving, int* total) {
            if (threadIdx.x % 32) return;
            unsigned mine = atomicAdd(next, 1);
            while (*serving != mine) {}
            __threadfence();
            total[0] += 1;
            PIECE
            *serving = mine + 1;
        }
        """,
        "__threadfence();",
        "",
        Race,
        "`total` where another",
        lambda: [np.zeros(1, np.uint32), np.zeros(1, np.uint32), ints(1)],
        [6],
        grid=3,
    ),
    "a pair of numbers behind a counter of versions": Pattern(
        """
        __global__ void f(volatile int* version, PIECE int* pair, int* y) {
            if (threadIdx.x) return;
            if (blockIdx.x == 0) {
                for (int i = 1; i < 4; i++) {
                    version[0] = 2 * i - 1;
                    __threadfence();
                    pair[0] = i;
                    pair[1] = i;
                    __threadfence();
                    version[0] = 2 * i;
                }
                y[0] = 1;
            } else {
                int seen, a, b;
                do {
                    do seen = version[0];
                    while (seen & 1);
                    __threadfence();
                    a = pair[0];
                    b = pair[1];
                    __threadfence();
                } while (version[0] != seen);
                y[blockIdx.x] = a == b;
            }
        }
        """,
        "volatile",
        "",
        Race,
        "`pair` where another block has",
        lambda: [ints(1), ints(2), ints(3)],
        [1, 1, 1],
        grid=3,
        block=32,
        always=False,
    ),
    "a counter that a block sets back": Pattern(
        """
        __global__ void f(int* count, int* y) {
            atomicAdd(count, 1);
            if (blockIdx.x == 3 && threadIdx.x == 0) PIECE;
            y[blockIdx.x * 32 + threadIdx.x] = 1;
        }
        """,
        "atomicExch(count, 0)",
        "count[0] = 0",
        Race,
        "race between blocks: write `count` where another block has updated atomically",
        lambda: [ints(1), ints(128)],
        [1] * 128,
        grid=4,
        block=32,
    ),
    "a barrier in a function that some leave before": Pattern(
        """
        __device__ __noinline__ int turned(int v, int* s) {
            if (v < PIECE) return v;
            s[v] = v;
            __syncthreads();
            return s[v ^ 1];
        }
        __global__ void f(int* y) {
            __shared__ int s[64];
            y[threadIdx.x] = turned(threadIdx.x, s);
        }
        """,
        "0",
        "32",
        BarrierFault,
        "32 threads of the block have exited before its barrier",
        lambda: [ints()],
        [1, 0, 3, 2],
    ),
    "two warps in turn": Pattern(
        """
        __global__ void f(int* y) {
            __shared__ int turn;
            if (threadIdx.x == 0) turn = 0;
            __syncthreads();
            int warp = threadIdx.x / 32;
            if (warp == 1) asm volatile("bar.arrive 1, 64;" ::: "memory");
            for (int round = 0; round < 4; round++) {
                asm volatile("bar.sync %0, 64;" :: "r"(1 + warp) : "memory");
                if (threadIdx.x % 32 == 0) {
                    y[turn] = warp;
                    turn += 1;
                }
                __syncwarp();
                if (warp == 0 || round < 3) asm volatile("bar.arrive %0, 64;" :: "r"(PIECE) : "memory");
            }
        }
        """,
        "2 - warp",
        "4 - warp",
        Deadlock,
        "every thread that is left waits at a barrier",
        lambda: [ints()],
        [0, 1] * 4,
    ),
    "a row of a matrix fragment": Pattern(
        """
        __global__ void f(unsigned* y) {
            __shared__ __align__(16) unsigned short s[8 * 16];
            unsigned at = __cvta_generic_to_shared(s + threadIdx.x % 8 * PIECE);
            asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" :: "r"(at), "r"(5) : "memory");
            __syncwarp();
            y[threadIdx.x] = s[threadIdx.x / 2 * 2 % 8];
        }
        """,
        "16",
        "12",
        Misaligned,
        "misaligned write of 16 bytes in shared memory",
        lambda: [np.zeros(64, np.uint32)],
        [5] * 32,
        block=32,
        arch="sm_90",
    ),
    "rows of a matrix beyond the array": Pattern(
        """
        __global__ void f(unsigned* y) {
            __shared__ __align__(16) unsigned short s[64];
            s[threadIdx.x] = s[threadIdx.x + 32] = 1;
            __syncthreads();
            unsigned at = __cvta_generic_to_shared(s + threadIdx.x % PIECE * 8), a, b;
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
            y[threadIdx.x] = a + b;
        }
        """,
        "8",
        "16",
        OutOfBounds,
        "read of 16 bytes outside",
        lambda: [np.zeros(64, np.uint32)],
        [0x20002] * 32,
        block=32,
    ),
    "structs with pads in shared memory": Pattern(
        """
        struct P { int a; char b; };
        __global__ void f(P* out, int* y) {
            __shared__ P s[64];
            s[threadIdx.x].a = threadIdx.x;
            PIECE
            __syncthreads();
            out[threadIdx.x] = s[63 - threadIdx.x];
            y[threadIdx.x] = out[threadIdx.x].a;
        }
        """,
        "s[threadIdx.x].b = 1;",
        "",
        Uninitialized,
        "read of shared memory that was never written",
        lambda: [np.zeros(64 * 8, np.uint8), ints()],
        list(range(63, -1, -1)),
    ),
}


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_and_its_mutant(name, seed):
    one = PATTERNS[name]
    made = one.made()
    run(one.code.replace("PIECE", one.right), "f", one.grid, one.block, *made, arch=one.arch, seed=seed)
    assert made[-1][: len(one.expected)].tolist() == one.expected
    if seed is None or one.always:
        wrong = one.code.replace("PIECE", one.wrong)
        fails(one.kind, wrong, "f", one.grid, one.block, *one.made(), arch=one.arch, seed=seed, says=[one.says])
