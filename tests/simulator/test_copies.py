"""Asynchronous copies, mbarriers, TMA tiles, clusters and wgmma, from inline assembly."""

import re

import numpy as np
import pytest
from simulator.kit import fails, launch, place, program, run

from cupyops.simulator import BarrierFault, Deadlock, Misaligned, OutOfBounds, Race, TensorMap, Uninitialized

PRELUDE = """
#include <cuda_fp16.h>
struct __align__(64) Map { char bytes[128]; };
__device__ unsigned shared_address(const void* p) { return __cvta_generic_to_shared(p); }
__device__ void init(unsigned long long* bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ void arrive(unsigned long long* bar) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" :: "r"(shared_address(bar)) : "memory");
}
__device__ void expect(unsigned long long* bar, int bytes) {
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1;}"
                 :: "r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ void wait(unsigned long long* bar, int parity) {
    asm volatile("{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN;"
                 "DONE: }" :: "r"(shared_address(bar)), "r"(parity) : "memory");
}
__device__ void load(void* to, const void* from, int bytes, unsigned long long* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void store(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ void load_tile(void* to, const Map* map, int x, int y, unsigned long long* bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}
__device__ void store_tile(const Map* map, int x, int y, const void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 :: "l"(map), "r"(x), "r"(y), "r"(shared_address(from)) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ unsigned of_rank(const void* p, int rank) {
    unsigned a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
    return a;
}
"""
HOPPER = {"arch": "sm_90a"}


# --- cp.async ---


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_of_every_size_with_zeros_behind(size):
    """The last argument says how many bytes are there; the rest is zero."""
    code = f"""
        #include <cuda_pipeline.h>
        __global__ void copy(const char* x, char* y) {{
            __shared__ __align__(16) char s[32 * {size}];
            int i = threadIdx.x * {size};
            __pipeline_memcpy_async(s + i, x + i, {size}, threadIdx.x % 4 == 3 ? {size // 2} : 0);
            __pipeline_commit();
            __pipeline_wait_prior(0);
            for (int k = 0; k < {size}; k++) y[i + k] = s[i + k];
        }}
    """
    x = np.arange(1, 32 * size + 1).astype(np.int8).reshape(32, size)
    y = np.zeros_like(x)
    run(code, "copy", 1, 32, x, y)
    expected = x.copy()
    expected[3::4, size // 2 :] = 0
    assert (y == expected).all()


PIPELINE = """
    #include <cuda_pipeline.h>
    __global__ void pipeline(const float* x, float* y, int tiles) {
        __shared__ float s[3][64];
        for (int i = 0; i < 2; i++) {
            __pipeline_memcpy_async(&s[i][threadIdx.x], x + 64 * i + threadIdx.x, 4);
            __pipeline_commit();
        }
        float sum = 0.f;
        for (int i = 0; i < tiles; i++) {
            __pipeline_wait_prior(LEFT);
            __syncthreads();
            sum += s[i % 3][63 - threadIdx.x];  // here
            if (i + 2 < tiles) __pipeline_memcpy_async(&s[(i + 2) % 3][threadIdx.x], x + 64 * (i + 2) + threadIdx.x, 4);
            __pipeline_commit();
        }
        y[threadIdx.x] = sum;
    }
"""


def test_a_pipeline_of_copies():
    x, y = np.arange(7 * 64, dtype=np.float32), np.zeros(64, np.float32)
    run(PIPELINE.replace("LEFT", "1"), "pipeline", 1, 64, x, y, 7)
    assert y.tolist() == x.reshape(7, 64)[:, ::-1].sum(0).tolist()
    says = ["read of shared memory while an asynchronous copy to it is in flight"]
    fails(Race, PIPELINE.replace("LEFT", "2"), "pipeline", 1, 64, x, y, 7, says=says)


def test_a_copy_outside_and_one_that_is_misaligned():
    code = """
        #include <cuda_pipeline.h>
        __global__ void copy(const char* x, int at, int to) {
            __shared__ __align__(16) char s[64];
            __pipeline_memcpy_async(s + to, x + at, 16);  // here
            __pipeline_commit();
            __pipeline_wait_prior(0);
        }
    """
    x = np.zeros(64, np.int8)
    run(code, "copy", 1, 1, x, 48, 48)
    fails(OutOfBounds, code, "copy", 1, 1, x, 64, 0, says=["outside `x`", "offset 64: just past the end"])
    fails(OutOfBounds, code, "copy", 1, 1, x, 0, 64, says=["asynchronous copy of 16 bytes outside the block's shared"])
    fails(Misaligned, code, "copy", 1, 1, x, 8, 0, says=["misaligned asynchronous copy of 16 bytes in global memory"])
    fails(Misaligned, code, "copy", 1, 1, x, 0, 8, says=["misaligned asynchronous copy of 16 bytes in shared memory"])


# --- mbarriers ---

MBARRIER = (
    PRELUDE
    + """
__global__ void rounds(int* y) {
    __shared__ unsigned long long bar;
    __shared__ int s[64];
    if (threadIdx.x == 0) init(&bar, COUNT);
    __syncthreads();  // sync
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        s[threadIdx.x] = threadIdx.x + i;
        arrive(&bar);
        wait(&bar, i % 2);
        sum += s[63 - threadIdx.x];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}
"""
)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_mbarrier_as_a_barrier(seed):
    y = np.zeros(64, np.int32)
    run(MBARRIER.replace("COUNT", "64"), "rounds", 2, 64, y, seed=seed, **HOPPER)
    assert y.tolist() == [4 * (63 - i) + 6 for i in range(64)]


def test_an_mbarrier_that_expects_too_many_or_too_few():
    y = np.zeros(64, np.int32)
    says = ["deadlock", "64 threads, first thread (0,0,0)", "wait for the mbarrier at offset", "lacks 1 of 65 arrivals"]
    fails(Deadlock, MBARRIER.replace("COUNT", "65"), "rounds", 1, 64, y, says=says, **HOPPER)
    says = ["more arrivals at an mbarrier than the 32 that it expects"]
    fails(BarrierFault, MBARRIER.replace("COUNT", "32"), "rounds", 1, 64, y, says=says, **HOPPER)


def test_an_mbarrier_before_its_init():
    code = MBARRIER.replace("if (threadIdx.x == 0) init(&bar, COUNT);", "")
    says = ["an mbarrier is used before mbarrier.init"]
    fails(BarrierFault, code, "rounds", 1, 64, np.zeros(64, np.int32), says=says, **HOPPER)


def test_an_mbarrier_that_others_do_not_know_of_yet():
    """Without the barrier after mbarrier.init another thread may come too early."""
    code = MBARRIER.replace("COUNT", "64").replace("__syncthreads();  // sync", "")
    says = ["update atomically shared memory that another thread has written", "thread (1,0,0)"]
    fails(Race, code, "rounds", 1, 64, np.zeros(64, np.int32), says=says, **HOPPER)


# --- bulk copies ---

BULK = (
    PRELUDE
    + """
__global__ void bulk(const float* x, float* y, int bytes, int at) {
    __shared__ __align__(16) float s[64];
    __shared__ unsigned long long bar;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&bar, 256);
        load(s, x + at, bytes, &bar);  // here
    }
    wait(&bar, 0);
    float v = s[threadIdx.x] * 2.f;
    __syncthreads();
    s[63 - threadIdx.x] = v;
    fence();
    __syncthreads();
    if (threadIdx.x == 0) store(y, s, 256);
}
"""
)


def test_bulk_copies_in_and_out():
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(BULK, "bulk", 1, 64, x, y, 256, 0, **HOPPER)
    assert y.tolist() == (2 * x[::-1]).tolist()


def test_a_bulk_copy_that_is_not_waited_for():
    code = (
        BULK.replace("wait(&bar, 0);", "")
        .replace("  // here", "")
        .replace("s[threadIdx.x] * 2.f;", "s[threadIdx.x];  // here")
    )
    says = ["read of shared memory while an asynchronous copy to it is in flight"]
    fails(Race, code, "bulk", 1, 64, np.zeros(64, np.float32), np.zeros(64, np.float32), 256, 0, says=says, **HOPPER)


def test_a_bulk_copy_of_fewer_bytes_than_announced():
    arguments = np.zeros(64, np.float32), np.zeros(64, np.float32), 240, 0
    says = ["deadlock", "lacks 16 of the 256 bytes that were announced (expect_tx)", "bytes were announced last at"]
    says += ["expect(&bar, 256);", "wait(&bar, 0);"]
    fails(Deadlock, BULK.replace("  // here", ""), "bulk", 1, 64, *arguments, says=says, **HOPPER)
    arguments = np.zeros(68, np.float32), np.zeros(64, np.float32), 256, 0
    code = BULK.replace("  // here", "").replace("expect(&bar, 256)", "expect(&bar, 240)")
    says = ["deadlock", "lacks an announcement (expect_tx) of 16 bytes that have come"]
    fails(Deadlock, code, "bulk", 1, 64, *arguments, says=says, **HOPPER)


def test_bulk_copies_that_are_misaligned_or_outside():
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    code = BULK.replace("  // here", "")
    says = ["a bulk copy whose size or addresses are no multiples of 16", "thread (0,0,0)"]
    fails(Misaligned, code, "bulk", 1, 64, x, y, 256, 1, says=says, **HOPPER)
    fails(Misaligned, code, "bulk", 1, 64, x, y, 248, 0, says=says, **HOPPER)
    fails(OutOfBounds, code, "bulk", 1, 64, x, y, 256, 4, says=["outside `x`", "past the end of `x`"], **HOPPER)
    fails(OutOfBounds, code, "bulk", 1, 64, np.zeros(96, np.float32), y, 288, 0, says=["shared memory"], **HOPPER)


def test_a_bulk_store_of_what_was_never_written():
    code = BULK.replace("    s[63 - threadIdx.x] = v;\n", "").replace(
        "load(s, x + at, bytes, &bar);", "expect(&bar, -256);"
    )
    code = code.replace("expect(&bar, 256);", "").replace("expect(&bar, -256);  // here", "arrive(&bar);")
    code = code.replace("float v = s[threadIdx.x] * 2.f;", "")
    arguments = np.zeros(64, np.float32), np.zeros(64, np.float32), 256, 0
    fails(Uninitialized, code, "bulk", 1, 64, *arguments, says=["shared memory that was never written"], **HOPPER)


# --- TMA tiles ---

TILES = (
    PRELUDE
    + """
__global__ void tiles(const __grid_constant__ Map in, const __grid_constant__ Map out, float* y) {
    __shared__ __align__(128) float s[8][16];
    __shared__ unsigned long long bar;
    int x = 16 * blockIdx.x - 4, row = 8 * blockIdx.y - 2, column = threadIdx.x % 16, line = threadIdx.x / 16;
    if (threadIdx.x == 0) init(&bar, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&bar, 512);
        load_tile(s, &in, x, row, &bar);
    }
    wait(&bar, 0);
    y[(blockIdx.y * 8 + line) * 32 + blockIdx.x * 16 + column] = s[line][column];
    __syncthreads();
    s[line][column] += 1000.f;
    fence();
    __syncthreads();
    if (threadIdx.x == 0) store_tile(&out, x + 4, row + 2, s);
}
"""
)


def test_tiles_in_and_out():
    """What lies outside the tensor is filled with zeros when read, and left out when written."""
    kernels, symbol = program(TILES, "tiles", "sm_90a")
    tensor = np.arange(1, 12 * 28 + 1, dtype=np.float32).reshape(12, 28)
    x = kernels.memory.allocate(tensor, "x")
    z = kernels.memory.allocate(np.zeros_like(tensor), "z")
    maps = [TensorMap.of_array(tensor, one.base, (16, 8)).encode() for one in (x, z)]
    y = np.full((16, 32), -1, np.float32)
    launch((kernels, symbol), ["in", "out", "y"], (2, 2), 128, *maps, y)
    padded = np.zeros((16, 32), np.float32)
    padded[2:14, 4:32] = tensor
    assert (y == padded).all()
    assert (z.buffer.view(np.float32).reshape(12, 28) == padded[:12, :28] + 1000).all()


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("load_tile(s, &in, x, row, &bar);", "load_tile(s, &in, x + 1, row, &bar);", Misaligned, "byte -12"),
        (
            "store_tile(&out, x + 4, row + 2, s);",
            "store_tile(&out, x + 4, row, s);",
            OutOfBounds,
            "(0, -2), innermost first",
        ),
    ],
)
def test_where_a_gpu_stops_at_a_tile(old: str, new: str, error: type[Exception], says: str):
    """At an innermost coordinate that is at no multiple of 16 bytes; at a store to a negative coordinate."""
    code = TILES.replace(old, new + "  // here")
    kernels, symbol = program(code, "tiles", "sm_90a")
    one = kernels.memory.allocate(np.zeros((12, 28), np.float32), "x")
    map_ = TensorMap.of_array(one.buffer.view(np.float32).reshape(12, 28), one.base, (16, 8)).encode()
    with pytest.raises(error, match=re.escape(says)) as caught:
        launch((kernels, symbol), ["in", "out", "y"], (2, 2), 128, map_, map_, np.zeros((16, 32), np.float32))
    for word in ["tiles", "thread (0,0,0) of block (0,0,0)", place(code, "// here"), "PTX line"]:
        assert word in str(caught.value)


def test_a_tile_through_what_is_no_map():
    code = TILES.replace("load_tile(s, &in, x, row, &bar);", "load_tile(s, &in, x, row, &bar);  // here")
    arguments = bytes(128), bytes(128), np.zeros((16, 32), np.float32)
    fails(OutOfBounds, code, "tiles", (2, 2), 128, *arguments, says=["no tensor map", "thread (0,0,0)"], **HOPPER)


# --- multicast ---

MULTICAST = (
    PRELUDE
    + """
__global__ void __cluster_dims__(4, 1, 1) spread(const __grid_constant__ Map map, const float* x, int* y, int mask) {
    __shared__ __align__(128) int tile[4][8];
    __shared__ __align__(16) int line[32];
    __shared__ unsigned long long bar;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    tile[threadIdx.x / 8][threadIdx.x % 8] = line[threadIdx.x] = -1;
    if (threadIdx.x == 0) {
        init(&bar, 1);
        if (mask >> rank & 1) expect(&bar, 256);  // what comes to this block, whoever fetches it
        else arrive(&bar);
    }
    cluster_sync();
    if (threadIdx.x == 0 && rank == 2) {
        unsigned long long policy;
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     "TILE_HINT [%0], [%1, {%2, %3}], [%4], %5 TILE_POLICY;"
                     :: "r"(shared_address(tile)), "l"(&map), "r"(4), "r"(1 + (int)(blockIdx.x / 4)),
                        "r"(shared_address(&bar)), "h"((unsigned short)mask), "l"(policy) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     "LINE_HINT [%0], [%1], %2, [%3], %4 LINE_POLICY;"
                     :: "r"(shared_address(line)), "l"(x), "r"(128), "r"(shared_address(&bar)), "h"((unsigned short)mask),
                        "l"(policy) : "memory");
    }
    wait(&bar, 0);  // here
    y[(blockIdx.x * 2 + 0) * 32 + threadIdx.x] = tile[threadIdx.x / 8][threadIdx.x % 8];
    y[(blockIdx.x * 2 + 1) * 32 + threadIdx.x] = line[threadIdx.x];
    cluster_sync();
}
"""
)
HINTS = {"TILE_HINT": ".L2::cache_hint", "LINE_HINT": ".L2::cache_hint", "TILE_POLICY": ", %6", "LINE_POLICY": ", %5"}
NO_HINTS = {"TILE_HINT": "", "LINE_HINT": "", "TILE_POLICY": "", "LINE_POLICY": ""}


def spread(mask, hints=NO_HINTS, code=MULTICAST, **options):
    """What eight blocks have: (block, of the tile or of the line, element)."""
    for old, new in hints.items():
        code = code.replace(old, new)
    kernels, symbol = program(code, "spread", "sm_90a")
    tensor = np.arange(160, dtype=np.int32).reshape(10, 16)
    x = kernels.memory.allocate(tensor, "x")
    map_ = TensorMap.of_array(tensor, x.base, (8, 4)).encode()
    y = np.zeros((8, 2, 32), np.int32)
    launch((kernels, symbol), ["map", "x", "y", "mask"], 8, 32, map_, tensor, y, np.int32(mask), **options)
    return tensor, y


@pytest.mark.parametrize("hints", [NO_HINTS, HINTS], ids=["no hint", "a hint for the cache"])
@pytest.mark.parametrize("mask", [0b1111, 0b0100, 0b1001])
def test_a_copy_to_several_blocks_of_a_cluster(mask, hints):
    """The bytes and the mbarrier's count come to the same place of each block that the mask names, and to no other."""
    for seed in (None, 0):
        tensor, y = spread(mask, hints, seed=seed)
        for block in range(8):
            if mask >> block % 4 & 1:
                first = 1 + block // 4
                assert (y[block, 0] == tensor[first : first + 4, 4:12].ravel()).all()
                assert (y[block, 1] == tensor.ravel()[:32]).all()
            else:
                assert (y[block] == -1).all()


def test_a_copy_to_blocks_that_the_cluster_has_not():
    with pytest.raises(OutOfBounds, match=re.escape("a copy to blocks 0b10001 of a cluster of 4")):
        spread(0b10001)


def test_a_multicast_of_which_a_block_does_not_wait():
    with pytest.raises(Race, match="shared memory"):
        spread(0b1111, code=MULTICAST.replace("wait(&bar, 0);  // here", "if (rank != 1) wait(&bar, 0);"))


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("&in, x, row", "&own, x, row", OutOfBounds, "a tensor map in shared memory: take it as a parameter"),
        ("&in, x, row", "(const Map*)((const char*)&in + 32), x, row", Misaligned, "a tensor map at no multiple of 64"),
    ],
)
def test_a_map_that_a_gpu_does_not_read(old, new, error, says):
    code = TILES.replace(old, new).replace(
        "    if (threadIdx.x == 0) init", "    __shared__ Map own;\n    if (threadIdx.x == 0) init"
    )
    kernels, symbol = program(code, "tiles", "sm_90a")
    one = kernels.memory.allocate(np.zeros((12, 28), np.float32), "x")
    map_ = TensorMap.of_array(one.buffer.view(np.float32).reshape(12, 28), one.base, (16, 8)).encode()
    with pytest.raises(error, match=says):
        launch((kernels, symbol), ["in", "out", "y"], (2, 2), 128, map_, map_, np.zeros((16, 32), np.float32))


# --- clusters ---

CLUSTER = (
    PRELUDE
    + """
__global__ void __cluster_dims__(4, 1, 1) gather(int* y) {
    __shared__ int s[32];
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    s[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
    cluster_sync();
    int sum = 0, v;
    for (int i = 0; i < 4; i++) {
        asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(of_rank(s + 31 - threadIdx.x, (rank + i) % 4)));
        sum = sum * 3 + v;
    }
    cluster_sync();
    asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(of_rank(s + threadIdx.x, rank ^ 1)), "r"(sum) : "memory");
    cluster_sync();
    y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
}
"""
)


SENT = (
    PRELUDE
    + """
__global__ void __cluster_dims__(4, 1, 1) send(int* y) {
    __shared__ int s[4][32];
    __shared__ unsigned long long bar;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) init(&bar, 1);
    cluster_sync();
    if (threadIdx.x == 0) expect(&bar, 4 * 32 * 4);
    for (int i = 0; i < 4; i++) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     :: "r"(of_rank(s[rank] + threadIdx.x, i)), "r"(100 * blockIdx.x + threadIdx.x), "r"(of_rank(&bar, i))
                     : "memory");
    }
    wait(&bar, 0);
    int sum = 0;
    for (int i = 0; i < 4; i++) sum = sum * 3 + s[i][31 - threadIdx.x];
    y[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""
)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_what_other_blocks_send(seed):
    y = np.zeros((8, 32), np.int32)
    run(SENT, "send", 8, 32, y, seed=seed, **HOPPER)
    own = 100 * np.arange(8)[:, None] + np.arange(32)[::-1]
    expected = [((own[4 * c] * 3 + own[4 * c + 1]) * 3 + own[4 * c + 2]) * 3 + own[4 * c + 3] for c in (0, 1)]
    np.testing.assert_array_equal(y, np.repeat(expected, 4, axis=0))


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_shared_memory_of_the_other_blocks(seed):
    y = np.zeros((8, 32), np.int32)
    run(CLUSTER, "gather", 8, 32, y, seed=seed, **HOPPER)
    sums = np.zeros((8, 32), np.int64)
    for block in range(8):
        for i in range(4):
            other = block // 4 * 4 + (block % 4 + i) % 4
            sums[block] = sums[block] * 3 + 100 * other + np.arange(31, -1, -1)
    assert y.tolist() == sums[[1, 0, 3, 2, 5, 4, 7, 6]].tolist()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_cluster_without_one_of_its_barriers(number):
    parts = CLUSTER.split("    cluster_sync();\n")
    code = "".join(
        part + ("    __syncthreads();\n" if i == number else "    cluster_sync();\n") * (i < 3)
        for i, part in enumerate(parts)
    )
    with pytest.raises((Race, Uninitialized)) as caught:
        run(code, "gather", 8, 32, np.zeros((8, 32), np.int32), **HOPPER)
    assert "shared memory" in str(caught.value)


def test_a_barrier_of_the_cluster_orders_global_memory():
    code = (
        PRELUDE
        + """
__global__ void __cluster_dims__(2, 1, 1) pairs(int* y) {
    y[blockIdx.x] = blockIdx.x;
    SYNC;
    y[8 + blockIdx.x] = y[blockIdx.x ^ 1];  // here
}
"""
    )
    y = np.zeros(16, np.int32)
    run(code.replace("SYNC", "cluster_sync()"), "pairs", 8, 1, y, **HOPPER)
    assert y[8:].tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    fails(
        Race,
        code.replace("SYNC", "__syncthreads()"),
        "pairs",
        8,
        1,
        y,
        says=["race between blocks: read `y`"],
        **HOPPER,
    )


# --- wgmma ---


def test_wgmma():
    """m64n8k16: both operands in shared memory, in 8 x 8 pieces of 128 bytes, without a swizzle."""
    code = (
        PRELUDE
        + """
__device__ unsigned long long descriptor(const void* p, int leading, int stride) {
    return (unsigned long long)(shared_address(p) >> 4) | (unsigned long long)(leading >> 4) << 16
        | (unsigned long long)(stride >> 4) << 32;
}
__global__ void multiply(const __half* a, const __half* b, float* y) {
    __shared__ __align__(128) __half sa[64 * 16];
    __shared__ __align__(128) __half sb[8 * 16];
    for (int i = threadIdx.x; i < 64 * 16; i += 128) {
        int row = i / 16, k = i % 16;
        sa[row / 8 * 128 + k / 8 * 64 + row % 8 * 8 + k % 8] = a[i];
    }
    int row = threadIdx.x / 16, k = threadIdx.x % 16;
    sb[k / 8 * 64 + row % 8 * 8 + k % 8] = b[threadIdx.x];
    __syncthreads();
    float d[4] = {1.f, 2.f, 3.f, 4.f};
    asm volatile("fence.proxy.async; wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0;"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(descriptor(sa, 128, 256)), "l"(descriptor(sb, 128, 256)), "r"(1));
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 0; i < 4; i++) y[(16 * warp + lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""
    )
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((64, 16), (8, 16)))
    y = np.zeros((64, 8), np.float32)
    run(code, "multiply", 1, 128, a, b, y, **HOPPER)
    start = 1 + np.arange(8) % 2 + 2 * (np.arange(64) // 8 % 2)[:, None]
    assert (y == a.astype(np.float32) @ b.astype(np.float32).T + start).all()
    missing = code.replace("    sb[k / 8", "    if (threadIdx.x != 77) sb[k / 8")
    says = ["read of shared memory that was never written", "offset 202 of `sb`"]
    fails(Uninitialized, missing, "multiply", 1, 128, a, b, y, says=says, **HOPPER)


OUTLIVED = (
    PRELUDE
    + """
__global__ void __cluster_dims__(2, 1, 1) last(int* y) {
    __shared__ int s[32];
    __shared__ unsigned long long bar;
    unsigned rank, v;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    s[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
    if (threadIdx.x == 0) init(&bar, 32);
    cluster_sync();
    if (rank == 0 || SYMMETRIC) {
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(of_rank(s + threadIdx.x, rank ^ 1)) : "memory");
        y[blockIdx.x * 32 + threadIdx.x] = v;
    }
    END
}
"""
)
REMOTE_ARRIVE = (
    'asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(of_rank(&bar, rank ^ 1)) : "memory");'
)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("symmetric", [0, 1])
def test_a_block_that_exits_while_others_read_its_shared_memory(symmetric, seed):
    """Whichever of them is faster, the cluster has to meet in between: at its barrier, or by an mbarrier."""
    code = OUTLIVED.replace("SYMMETRIC", str(symmetric))
    for end in (
        "cluster_sync();",
        f"if (rank == 0 || {symmetric}) {REMOTE_ARRIVE} if (rank || {symmetric}) wait(&bar, 0);",
    ):
        y = np.zeros((4, 32), np.int32)
        run(code.replace("END", end), "last", 4, 32, y, seed=seed, **HOPPER)
        expected = 100 * np.array([1, 0, 3, 2])[:, None] + np.arange(32)
        assert (y == (expected if symmetric else expected * [[1], [0], [1], [0]])).all()
    for end in ("", "__syncthreads();", 'asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");'):
        with pytest.raises(
            Race, match="another block's shared memory, with no meeting of the cluster before that block"
        ):
            run(code.replace("END", end), "last", 4, 32, np.zeros((4, 32), np.int32), seed=seed, **HOPPER)
