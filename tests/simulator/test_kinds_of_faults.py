"""Kinds of faults that must be found: of each two mutants or more, a line each, with a right twin that must stay clean.

`@right -> wrong@` is what the two differ in; behind `//` stands what the message says besides, which names the line.
A kept pointer and too much shared memory are in `test_simulation.py`.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from simulator.kit import fails, run

from cupyops.simulator import BarrierFault, Deadlock, OutOfBounds, Race, SimulatorError, Uninitialized, WarpFault


class Kind(NamedTuple):
    """The body of a kernel of `int* y, int* g, int zero`, with PIECE where each line of `mutants` belongs."""

    code: str
    mutants: str
    found: tuple[type[SimulatorError], str]  # the error, and what it says
    launch: tuple[int, int, str] = (1, 64, "sm_80")  # grid, block, arch


HALVES = """
    MEMORY int t = threadIdx.x, lane = t % 32, first = t - lane;
    unsigned half = lane < 16 ? 0xffff : 0xffff0000, third = lane < 8 ? 0xff : 0xffffff00;
    s[t] = t; PIECE
"""
MEETINGS = """
    __syncwarp(@~0u -> half@); y[t] = s[first + 31 - lane];
    __syncwarp(half); y[t] = s[first + @(lane ^ 15) -> (lane + 1) % 32@];
    __syncwarp(third); y[t] = lane < 8 ? s[t @^ 7 -> + 8@] : 0;
"""
LOCAL = """
    char a[17]; int n = zero + threadIdx.x % 2;
    for (int i = 0; i < 17; i++) a[i] = i + n;
    for (int i = 0; i < 17; i++) a[(a[i] + n) % 17] += i;
    PIECE
"""
UNSET = """
    int a[8], v, n = zero + 8, t = threadIdx.x;
    for (int i = 0; i < n - 1; i++) a[i * 3 % n] = i;
    asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, 7; @p mov.s32 %0, 3; }" : "+r"(v) : "r"(t));
    PIECE
"""
NEIGHBOURS = """
    __shared__ int a[32]; __shared__ int b[32]; __shared__ short c[7]; int t = threadIdx.x;
    a[t] = b[t] = c[t % 7] = t % 7; __syncthreads();
    PIECE
    __syncthreads(); y[t] += a[t] + b[t] + c[t % 7];
"""
CLUSTER = """
    __shared__ int own[32]; own[threadIdx.x] = blockIdx.x;
    unsigned rank, at = (unsigned)__cvta_generic_to_shared(own), far; int v = 0;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(at), "r"(rank ^ 1));
    PIECE
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory"); y[32 * blockIdx.x + threadIdx.x] = v;
"""
WAIT = 'barrier.cluster.wait;" ::: "memory"); asm volatile("'
READ = 'ld.shared::cluster.s32 %0, [%1];" : "+r"(v) : "r"(far) : "memory");'
WRITE = 'st.shared::cluster.s32 [%1], 7;" : "+r"(v) : "r"(far) : "memory");'

KINDS = {
    "a partial __syncwarp for the whole warp: shared memory": Kind(
        HALVES.replace("MEMORY", "__shared__ int s[64];"), MEETINGS, (Race, "that another thread has written")
    ),
    "a partial __syncwarp for the whole warp: global memory": Kind(
        HALVES.replace("MEMORY", "int* s = g;"), MEETINGS, (Race, "race within a block")
    ),
    "masks that contradict each other": Kind(
        "int lane = threadIdx.x % 32; unsigned m = lane < 2 ? 3 : lane < 16 ? 0xfffc : ~0xffff; PIECE y[threadIdx.x] = v;",
        """
        if (lane == @99 -> 5@) m = 0x30; int v = __shfl_xor_sync(m, lane, 1);  // mask 0x0000fffc names lane 5, which names
        if (lane == @99 -> 5@) m = 0x30; int v = __shfl_sync(m, lane, 0, 2);
        if (lane == @99 -> 5@) m = 0x30; int v = __ballot_sync(m, lane > 4);
        if (lane == @99 -> 5@) m = 0x30; int v = __reduce_add_sync(m, lane);
        if (lane == @99 -> 5@) m = 0x30; int v = __match_any_sync(m, lane % 2);
        if (lane == @99 -> 5@) m = 0x30; int v = 0; __syncwarp(m);
        """,
        (WarpFault, "name masks that contradict each other"),
    ),
    "a shuffle from a lane outside of the mask": Kind(
        "int lane = threadIdx.x % 32, v = lane, o; unsigned m = lane < 16 ? 0xffff : ~0xffff; PIECE",
        """
        v += __shfl_xor_sync(m, v, @8 -> 16@); y[threadIdx.x] = v;  // stores
        v = __shfl_sync(m, v, @lane & 16 -> 0@); y[threadIdx.x] = v;  // thread (16
        o = __shfl_up_sync(m, v, 1); if (lane @% 16 -> @) v = o; y[threadIdx.x] = v;  // thread (16
        o = __shfl_down_sync(m, v, 1); if (lane @% 16 -> @ < 15) v += o; @ -> else v = o;@ y[threadIdx.x] = v;
        """,
        (Uninitialized, "a value that nothing has written"),
    ),
    "a named barrier with two counts": Kind(
        "int t = threadIdx.x; PIECE y[t] = 1;",
        """
        if (t < 32) asm volatile("bar.sync 1, 64;"); else asm volatile("bar.sync 1, @64 -> 96@;");  // wait for 96 threads
        if (t < 32) asm volatile("bar.arrive 2, 64;"); else asm volatile("bar.sync 2, @64 -> 32@;");  // wait for 32 threads
        if (t < 32) asm volatile("barrier.sync 3, 64;"); else asm volatile("barrier.sync 3@, 64 -> @;");  // for all threads
        """,
        (BarrierFault, "but others have come to it that expect 64"),
    ),
    "setmaxnreg beyond the pool": Kind(
        "int t = threadIdx.x; PIECE; y[t] = 1;",
        """
        if (t < 128) asm("setmaxnreg.dec.sync.aligned.u32 @24 -> 40@;"); else asm("setmaxnreg.inc.sync.aligned.u32 240;")
        if (t < 128) asm("setmaxnreg.dec.sync.aligned.u32 40;"); else asm("setmaxnreg.inc.sync.aligned.u32 @232 -> 240@;")
        """,
        (Deadlock, "setmaxnreg.inc waits for registers that are never given back"),
        (1, 384, "sm_90a"),
    ),
    "setmaxnreg by some warps of a warpgroup": Kind(
        "PIECE y[threadIdx.x] = 1;",
        """
        if (threadIdx.x < @128 -> 32@) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x < @256 -> 224@) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        """,
        (WarpFault, "an instruction of all 128 lanes is executed by some of them only"),
        (1, 384, "sm_90a"),
    ),
    "local arrays by up to 15 bytes": Kind(
        LOCAL,
        """
        y[threadIdx.x] = a[n + @15 -> 16@];  // offset 17: just past the end of the thread's local memory
        y[threadIdx.x] = a[n + @15 -> 30@];
        a[n @+ 15 -> - 1@] = 1; y[threadIdx.x] = a[n];  // write of 1 byte
        """,
        (OutOfBounds, "the thread's local memory (17 bytes)"),
        (1, 2, "sm_80"),
    ),
    "local memory or registers that nothing has written": Kind(
        UNSET,
        """
        y[t] = a[t * 3 % @5 -> 8@];  // stores a value
        if (a[zero + @4 -> 5@] > 1) y[t] = 1;
        if (t < @7 -> 8@) y[t] = v;  // stores a value that nothing has written & thread (7
        if (t < @7 -> 8@ && v > 2) y[t] = 1;
        if (t < @7 -> 8@) atomicMax(y, v);
        y[t + (t < @7 -> 8@ ? v : 3) - 3] = 1;  // takes for an address a value
        y[t] = __shfl_sync(0xff, v, @0 -> 7@);
        """,
        (Uninitialized, "that nothing has written"),
        (1, 8, "sm_80"),
    ),
    "a[32] into the neighbouring shared array": Kind(
        NEIGHBOURS,
        """
        y[t] = a[t + zero@ -> + 1@];  // read of 4 bytes outside `a` & offset 128: just past the end of `a`
        b[@31 -> 32@ + zero] = 1;  // write of 4 bytes outside `b`
        y[t] = c[t % 7 + zero@ -> + 1@];
        atomicAdd(a + zero @+ 31 -> - 1@, 1);  // offset -4: 4 bytes before the start of `a`
        y[t] = ((int2*)b)[@15 -> 16@ + zero].y;
        """,
        (OutOfBounds, "in shared memory"),
        (1, 32, "sm_80"),
    ),
    "ld.global.nc of what this launch writes": Kind(
        "int t = threadIdx.x; g[t] = t; __syncthreads(); PIECE",
        """
        y[t] = @*( -> __ldg(@g + 63 - t);  // read of `g`
        y[t] = __ldg(@y -> g@ + t);  // read of `g`
        if (t < 16) ((int4*)y)[t] = @*( -> __ldg(@(const int4*)g + t);
        """,
        (Race, "by ld.global.nc where this launch has written"),
    ),
    "an atomic of a block where several blocks meet": Kind(
        "PIECE if (threadIdx.x == 99) y[0] = 1;",
        """
        atomicAdd@ -> _block@(g, 1);
        atomicMax_block(g@ + blockIdx.x -> @, 1);
        atomicCAS@_system -> _block@(g, 0, 1);
        """,
        (Race, "race between blocks: update atomically `g`"),
        (3, 64, "sm_80"),
    ),
    "a race through global memory within a block": Kind(
        "int t = threadIdx.x; PIECE y[t] += t;",
        """
        @atomicAdd(&g[t % 8], 1) -> g[t % 8] += 1@;  // write `g` where another thread has read & offset 0 of `g`
        int v = g[t ^ 33]; @__syncthreads(); -> @ g[t] = v + 1;
        g[t] = t; @__syncthreads(); -> __syncwarp();@ y[t] = g[t ^ 32];
        for (int h = 32; h; h /= 2) { @__syncthreads(); -> @ if (t < h) g[t] += g[t + h]; }
        g[0] = @5 -> t@;  // threads of one instruction write different values to one place of `g`
        if (t == 0) g[0] = 1; @__syncthreads(); -> @ y[t] = g[0];
        """,
        (Race, "race within a block"),
    ),
    "barrier.cluster.arrive.relaxed for an order": Kind(
        CLUSTER,
        f"""
        asm volatile("@fence.acq_rel.cluster; -> @ barrier.cluster.arrive.relaxed; {WAIT}{READ}
        asm volatile("@fence.sc.cluster; -> @ barrier.cluster.arrive.relaxed.aligned; {WAIT}{READ}
        asm volatile("barrier.cluster.arrive@.release -> .relaxed@; {WAIT}{WRITE}
        """,
        (Race, "shared memory that another thread has written"),
        (4, 32, "sm_90"),
    ),
    "a barrier before which threads have exited": Kind(
        "int t = threadIdx.x; __shared__ int s[64]; PIECE",
        """
        if (t >= @64 -> 40@) return; s[t] = t; __syncthreads(); y[t] = s[39 - t % 40];
        if (t > @63 -> 50@) return; y[t] = __syncthreads_or(t == 3);
        """,
        (BarrierFault, "exited_lanes=True"),
    ),
}
LINES = [(kind, line.strip()) for kind, one in KINDS.items() for line in one.mutants.split("\n") if line.strip()]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("kind", "line"), LINES)
def test_a_mutant_is_found_and_its_twin_is_clean(kind, line, seed):
    assert sum(kind == other for other, _ in LINES) > 1
    text, _, (error, says), (grid, block, arch) = KINDS[kind]
    options, (mutant, _, details) = {"arch": arch, "seed": seed}, line.partition("  // ")

    def call(choice: str) -> tuple[Any, ...]:
        piece = re.sub(r"@(.*?) -> (.*?)@", choice, mutant) + "  // here\n"
        bounds = {"sm_90": "__cluster_dims__(2)", "sm_90a": "__launch_bounds__(384)"}.get(arch, "")
        code = f"__global__ void {bounds} f(int* y, int* g, int zero) {{\n{text.replace('PIECE', piece)}}}"
        return code, "f", grid, block, *(np.zeros(grid * block, np.int32) for _ in range(2)), 0

    run(*call(r"\1"), **options)
    fails(error, *call(r"\2"), says=[says, *details.split(" & ")], **options)
    if says == "exited_lanes=True":
        run(*call(r"\2"), exited_lanes=True, **options)
