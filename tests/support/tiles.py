"""Kernels that copy by tensor maps, for the tests of those: tiles in and out, and shared memory as a copy leaves it."""

from __future__ import annotations

import cupyops

ARCH = "sm_90"
SHARED = 32 * 1024 + 1024  # bytes of dynamic shared memory: a tile of at most 32 KiB at a multiple of 1024

# A tile of RANK dimensions begins at (x, y, z), innermost first. One thread does it all.
TEXT = """
struct alignas(64) TensorMap { char bytes[128]; };
using u32 = unsigned;
__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ char* tile() {
    extern __shared__ char memory[];
    u32 start = shared_address(memory);
    return memory + ((start + 1023) / 1024 * 1024 - start);
}

template <int RANK> __device__ void load(const TensorMap* map, char* to, int x, int y, int z, int bytes) {
    __shared__ unsigned long long bar;
    u32 at = shared_address(&bar), place = shared_address(to), done = 0;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" :: "r"(at), "r"(bytes)
                 : "memory");
#define LOAD "cp.async.bulk.tensor."
#define INTO "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    if constexpr (RANK == 1)
        asm volatile(LOAD "1" INTO "[%0], [%1, {%2}], [%3];" :: "r"(place), "l"(map), "r"(x), "r"(at) : "memory");
    if constexpr (RANK == 2)
        asm volatile(LOAD "2" INTO "[%0], [%1, {%2, %3}], [%4];"
                     :: "r"(place), "l"(map), "r"(x), "r"(y), "r"(at) : "memory");
    if constexpr (RANK == 3)
        asm volatile(LOAD "3" INTO "[%0], [%1, {%2, %3, %4}], [%5];"
                     :: "r"(place), "l"(map), "r"(x), "r"(y), "r"(z), "r"(at) : "memory");
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.b32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at) : "memory");
}

template <int RANK> __device__ void store(const TensorMap* map, const char* from, int x, int y, int z) {
    u32 place = shared_address(from);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#define OUT "d.global.shared::cta.tile.bulk_group "
    if constexpr (RANK == 1)
        asm volatile(LOAD "1" OUT "[%0, {%1}], [%2];" :: "l"(map), "r"(x), "r"(place) : "memory");
    if constexpr (RANK == 2)
        asm volatile(LOAD "2" OUT "[%0, {%1, %2}], [%3];" :: "l"(map), "r"(x), "r"(y), "r"(place) : "memory");
    if constexpr (RANK == 3)
        asm volatile(LOAD "3" OUT "[%0, {%1, %2, %3}], [%4];" :: "l"(map), "r"(x), "r"(y), "r"(z), "r"(place) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// grid (1), block (1): a tile of `from` at (x, y, z) goes to the same place of `to`
template <int RANK>
__global__ void copy(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, int x, int y, int z,
                     int bytes) {
    load<RANK>(&from, tile(), x, y, z, bytes);
    store<RANK>(&to, tile(), x, y, z);
}

// grid (tiles in x, tiles in y), block (1): all tiles; `by` is a pointer that may be null, and comes first
__global__ void copy_all(const float* by, const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to,
                         int columns, int rows) {
    int x = blockIdx.x * columns, y = blockIdx.y * rows;
    load<2>(&from, tile(), x, y, 0, columns * rows * 4);
    if (by)
        for (int i = 0; i < columns * rows; ++i) ((float*)tile())[i] *= *by;
    store<2>(&to, tile(), x, y, 0);
}

// grid (1), block (1): what a copy leaves in shared memory
template <int RANK>
__global__ void dump(const __grid_constant__ TensorMap from, unsigned char* out, int x, int y, int z, int bytes) {
    load<RANK>(&from, tile(), x, y, z, bytes);
    for (int i = 0; i < bytes; ++i) out[i] = tile()[i];
}
"""
copy = cupyops.Kernel(TEXT, "copy<RANK>", RANK=(1, 2, 3))
copy_all = cupyops.Kernel(TEXT, "copy_all")
dump = cupyops.Kernel(TEXT, "dump<RANK>", RANK=(1, 2, 3))
BOX = (4, 8)  # of copy_all in these


def copied(x, y, by=None):
    """y = x * by, or x, as matrices of float32 by all tiles of them."""
    maps = cupyops.tensor_map(x, BOX), cupyops.tensor_map(y, BOX, written=True)
    grid = cupyops.ceil_div(x.shape[1], BOX[1]), cupyops.ceil_div(x.shape[0], BOX[0])
    copy_all[grid, 1, SHARED](by, *maps, BOX[1], BOX[0])
