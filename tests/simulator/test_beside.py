"""What goes on beside the threads: copies, and products of matrices. Of each kind a kernel that is right, and twins of it,
each of which lacks one wait, fence or arrival and is told so at its line, in whatever order things run.
"""

import inspect

import numpy as np
import pytest
from simulator import kit
from simulator.kit import launch, program, run
from simulator.test_copies import HOPPER, PRELUDE

from cupyops.simulator import BarrierFault, Deadlock, OutOfBounds, Race, TensorMap, Uninitialized

SEEDS = [None, 0, 1, 2]
IN_FLIGHT = "read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
UNFENCED = "reads shared memory that stores have written, with no fence.proxy.async in between"
UNORDERED = "reads shared memory that another thread has written, with no barrier in between"
STILL_READ = "write shared memory that a bulk copy may still read, with no cp.async.bulk.wait_group.read in between"
OF_ANOTHER = "of another block's shared memory by an instruction for the block's own"

ASSEMBLY = (
    PRELUDE
    + """
__device__ void send(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void wait_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void arrive_at(unsigned bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ unsigned rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
"""
)


def twin(code, old, new):
    """The kernel with one piece of it in another way, and the mark where that is told of."""
    code = inspect.cleandoc(ASSEMBLY) + "\n" + inspect.cleandoc(code)
    assert code.count(old) == 1, old
    return code.replace(old, new)


def right(code):
    return inspect.cleandoc(ASSEMBLY) + "\n" + inspect.cleandoc(code)


def fails(kind, *arguments, says=(), seed=None, **options):
    """Where threads run in their order, as `kit.fails` has it. With a seed the other party may be the one that is told."""
    if seed is None or kind is not Race:
        kit.fails(kind, *arguments, says=says, seed=seed, **options)
        return
    with pytest.raises((Race, Uninitialized)):
        run(*arguments, seed=seed, **options)


# --- copies that report to an mbarrier ---

LOAD = """
    __global__ void k(const float* x, float* y) {
        __shared__ __align__(16) float s[64];
        __shared__ unsigned long long full;
        if (threadIdx.x == 0) init(&full, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            expect(&full, 256);
            load(s, x, 256, &full);
        }
        wait(&full, 0);
        y[threadIdx.x] = s[63 - threadIdx.x];
    }
"""
READ = "y[threadIdx.x] = s[63 - threadIdx.x];"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_copy_and_its_wait(seed):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(right(LOAD), "k", 1, 64, x, y, seed=seed, **HOPPER)
    assert y.tolist() == x[::-1].tolist()
    for without in ("", "if (threadIdx.x == 0) wait(&full, 0);"):
        code = twin(LOAD, "wait(&full, 0);", without).replace(READ, READ + "  // here")
        code = code.replace("load(s, x, 256, &full);", "load(s, x, 256, &full);  // other")
        says = [IN_FLIGHT, "the copy reports to the mbarrier at offset", "for which this thread has not waited"]
        fails(Race, code, "k", 1, 64, x, y, says=says, seed=seed, **HOPPER)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("passes_on", ["__syncthreads();", "__syncwarp();", "arrive(&other); wait(&other, 0);"])
def test_one_thread_waits_for_others(passes_on, seed):
    """What it knows then is known behind every barrier that it comes through, and to nobody else."""
    code = twin(LOAD, "wait(&full, 0);", f"if (threadIdx.x % 32 == 5) wait(&full, 0);\n{passes_on}")
    code = code.replace("init(&full, 1);", "init(&full, 1), init(&other, 64);")
    code = code.replace("unsigned long long full;", "unsigned long long full, other;")
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(code, "k", 1, 64, x, y, seed=seed, **HOPPER)
    assert y.tolist() == x[::-1].tolist()
    if passes_on == "__syncwarp();":
        code = code.replace("threadIdx.x % 32 == 5", "threadIdx.x == 5").replace(READ, READ + "  // here")
        fails(Race, code, "k", 1, 64, x, y, says=[IN_FLIGHT, "thread (32,0,0)"], seed=seed, **HOPPER)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("expected", "lacks"),
    [
        (272, "lacks 16 of the 272 bytes that were announced (expect_tx)"),
        (240, "lacks an announcement (expect_tx) of 16 bytes that have come"),
    ],
)
def test_a_wrong_count_of_bytes_is_a_deadlock_that_names_the_mbarrier(expected, lacks, seed):
    code = twin(LOAD, "expect(&full, 256);", f"expect(&full, {expected});").replace(
        "wait(&full, 0);", "wait(&full, 0);  // here"
    )
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    says = [
        "deadlock",
        "64 threads, first thread (0,0,0)",
        "wait for the mbarrier at offset",
        lacks,
        "announced last at",
    ]
    fails(Deadlock, code, "k", 1, 64, x, y, says=says, seed=seed, **HOPPER)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_that_exits_before_its_copy_has_come(seed):
    code = twin(LOAD, READ, "").replace("wait(&full, 0);", "").replace("&full);\n    }", "&full);  // here\n    }")
    says = ["a block exits while an asynchronous copy into its shared memory is in flight", "which nobody waits for"]
    try:
        run(code, "k", 1, 64, np.zeros(64, np.float32), np.zeros(64, np.float32), seed=seed, **HOPPER)
    except Race:
        fails(
            Race, code, "k", 1, 64, np.zeros(64, np.float32), np.zeros(64, np.float32), says=says, seed=seed, **HOPPER
        )
    else:
        assert seed is not None  # it has come by chance


TILE = """
    __global__ void k(const __grid_constant__ Map map, float* y) {
        __shared__ __align__(128) float s[4][16];
        __shared__ unsigned long long full;
        if (threadIdx.x == 0) init(&full, 1);
        __syncthreads();
        if (threadIdx.x == 0) {
            expect(&full, 256);
            load_tile(s, &map, 0, 0, &full);
        }
        wait(&full, 0);
        y[threadIdx.x] = s[threadIdx.x / 16][threadIdx.x % 16];
    }
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tile_and_its_wait(seed):
    tensor, y = np.arange(64, dtype=np.float32).reshape(4, 16), np.zeros(64, np.float32)
    for code in (right(TILE), twin(TILE, "wait(&full, 0);", "")):
        kernels, symbol = program(code, "k", "sm_90a")
        x = kernels.memory.allocate(tensor, "x")
        map_ = TensorMap.of_array(tensor, x.base, (16, 4)).encode()
        if "wait(&full" in code:
            launch((kernels, symbol), ["map", "y"], 1, 64, map_, y, seed=seed)
            assert (y == tensor.ravel()).all()
        else:
            with pytest.raises((Race, Uninitialized), match=IN_FLIGHT if seed is None else "read of shared memory"):
                launch((kernels, symbol), ["map", "y"], 1, 64, map_, y, seed=seed)


RING = """
    __global__ void k(const float* x, float* y, int rounds) {
        __shared__ __align__(16) float s[2][32];
        __shared__ unsigned long long full[2], empty[2];
        if (threadIdx.x == 0) for (int i = 0; i < 2; i++) init(&full[i], 1), init(&empty[i], 32);
        __syncthreads();
        if (threadIdx.x == 32) {
            for (int i = 0; i < rounds; i++) {
                wait(&empty[i % 2], i / 2 % 2 ^ 1);
                expect(&full[i % 2], 128);
                load(s[i % 2], x + 32 * i, 128, &full[i % 2]);
            }
        } else if (threadIdx.x < 32) {
            float sum = 0;
            for (int i = 0; i < rounds; i++) {
                wait(&full[i % 2], i / 2 % 2);
                sum += s[i % 2][31 - threadIdx.x];
                arrive(&empty[i % 2]);
            }
            y[threadIdx.x] = sum;
        }
    }
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_of_stages(seed):
    x, y = np.arange(7 * 32, dtype=np.float32), np.zeros(32, np.float32)
    run(right(RING), "k", 1, 64, x, y, 7, seed=seed, **HOPPER)
    assert y.tolist() == x.reshape(7, 32)[:, ::-1].sum(0).tolist()
    # the stage is not given back
    code = twin(RING, "arrive(&empty[i % 2]);", "")
    says = ["deadlock", "lacks 32 of 32 arrivals", "lacks 1 of 1 arrivals", "wait(&empty[i % 2]", "wait(&full[i % 2]"]
    fails(Deadlock, code, "k", 1, 64, x, y, 7, says=says, seed=seed, **HOPPER)
    # nor waited for
    for kept in (
        twin(RING, "wait(&empty[i % 2], i / 2 % 2 ^ 1);", ""),
        twin(RING, "wait(&full[i % 2], i / 2 % 2);", ""),
    ):
        with pytest.raises((Race, BarrierFault, Uninitialized)):
            run(kept, "k", 1, 64, x, y, 7, seed=seed, **HOPPER)


TIED = """
    __global__ void k(const float* x, float* y) {
        __shared__ float s[64];
        __shared__ unsigned long long full;
        if (threadIdx.x == 0) init(&full, COUNT);
        __syncthreads();
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                     :: "r"(shared_address(s + threadIdx.x)), "l"(x + threadIdx.x) : "memory");
        asm volatile("cp.async.mbarrier.arriveNOINC.shared::cta.b64 [%0];" :: "r"(shared_address(&full)) : "memory");
        MORE;
        wait(&full, 0);
        y[threadIdx.x] = s[63 - threadIdx.x];
    }
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("noinc", "more"), [(".noinc", ""), ("", "arrive(&full)")])
def test_copies_tied_to_an_mbarrier(noinc, more, seed):
    """With .noinc they arrive for those who are expected; else the phase expects them besides."""
    kernel = TIED.replace("NOINC", noinc).replace("MORE", more).replace("COUNT", "64")
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run(right(kernel), "k", 1, 64, x, y, seed=seed, **HOPPER)
    assert y.tolist() == x[::-1].tolist()
    code = twin(kernel, "wait(&full, 0);", "").replace(READ, READ + "  // here")
    fails(Race, code, "k", 1, 64, x, y, says=[IN_FLIGHT], seed=seed, **HOPPER)


# --- copies to global memory ---

STORE = """
    __global__ void k(float* y, float* z) {
        __shared__ __align__(16) float s[64];
        s[threadIdx.x] = threadIdx.x;
        fence();
        __syncthreads();
        if (threadIdx.x == 0) {
            send(y, s, 256);
            commit();
            wait_read();
        }
        __syncthreads();
        s[threadIdx.x] = -1;
        if (threadIdx.x == 0) {
            wait_stored();
            z[0] = y[7];
        }
    }
"""
STORES = {
    "no fence": ("fence();\n", "\n", "send(y, s, 256);", "a bulk copy " + UNFENCED),
    "no barrier before": ("fence();\n    __syncthreads();", "fence();", "send(y, s, 256);", "a bulk copy " + UNORDERED),
    "no wait": ("commit();\n        wait_read();", "commit();", "s[threadIdx.x] = -1;", STILL_READ),
    "no group": ("commit();\n", "\n", "s[threadIdx.x] = -1;", STILL_READ),
    "no barrier after": ("}\n    __syncthreads();", "}", "s[threadIdx.x] = -1;", STILL_READ),
    "not stored": ("wait_stored();", "", "z[0] = y[7];", "where a bulk copy is still to store, with no cp.async.bulk.wait"),
    "exits": (
        "wait_read();\n    }\n    __syncthreads();\n    s[threadIdx.x] = -1;\n    if (threadIdx.x == 0) {\n"
        "        wait_stored();\n        z[0] = y[7];",
        "",
        "send(y, s, 256);",
        "a thread exits while its bulk copy may still read the block's shared memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bulk_store(seed):
    y, z = np.zeros(64, np.float32), np.zeros(1, np.float32)
    run(right(STORE), "k", 1, 64, y, z, seed=seed, **HOPPER)
    assert y.tolist() == list(range(64)) and z[0] == 7


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STORES)
def test_a_bulk_store_without(name, seed):
    old, new, at, says = STORES[name]
    code = twin(STORE, old, new).replace(at, at + "  // here")
    fails(Race, code, "k", 1, 64, np.zeros(64, np.float32), np.zeros(1, np.float32), says=[says], seed=seed, **HOPPER)


def test_a_fence_behind_the_barrier_by_the_thread_that_sends():
    code = twin(STORE, "    fence();\n    __syncthreads();", "    __syncthreads();\n    if (threadIdx.x == 0) fence();")
    y = np.zeros(64, np.float32)
    run(code, "k", 1, 64, y, np.zeros(1, np.float32), **HOPPER)
    assert y.tolist() == list(range(64))
    code = code.replace("threadIdx.x == 0) fence()", "threadIdx.x == 1) fence()").replace("send(y", "/* */ send(y")
    fails(Race, code, "k", 1, 64, y, np.zeros(1, np.float32), says=["a bulk copy " + UNFENCED], **HOPPER)


# --- reductions ---


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize(
    ("operation", "type_", "c_type", "dtype"),
    [
        ("add", "f32", "float", np.float32),
        ("add", "u64", "unsigned long long", np.uint64),
        ("add.noftz", "f16", "__half", np.float16),
        ("min", "s32", "int", np.int32),
        ("max", "u32", "unsigned", np.uint32),
        ("xor", "b32", "unsigned", np.uint32),
        ("inc", "u32", "unsigned", np.uint32),
    ],
)
def test_a_bulk_reduction(operation, type_, c_type, dtype, seed):
    code = right(f"""
        __global__ void k(const {c_type}* x, {c_type}* y) {{
            __shared__ __align__(16) {c_type} s[64];
            s[threadIdx.x] = x[64 * blockIdx.x + threadIdx.x];
            fence();
            __syncthreads();
            if (threadIdx.x == 0) {{
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{type_} [%0], [%1], %2;"
                             :: "l"(y), "r"(shared_address(s)), "r"((int)sizeof(s)) : "memory");
                commit();
                wait_read();
            }}
        }}
    """)
    rng = np.random.default_rng(3)
    blocks = 1 if operation == "inc" else 3  # whose result depends on the order
    x, y = rng.integers(0, 50, (blocks, 64)).astype(dtype), rng.integers(0, 50, 64).astype(dtype)
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}.get(operation.split(".")[0])
    expected = y.copy()
    for row in x:
        expected = combine(expected, row) if combine else np.where(expected >= row, 0, expected + 1).astype(dtype)
    run(code, "k", blocks, 64, x, y, seed=seed, **HOPPER)
    assert (y == expected).all()


def test_a_tile_that_is_added():
    code = right("""
        __global__ void k(const __grid_constant__ Map map) {
            __shared__ __align__(128) float s[4][16];
            s[threadIdx.x / 16][threadIdx.x % 16] = threadIdx.x;
            fence();
            __syncthreads();
            if (threadIdx.x == 0) {
                asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
                             :: "l"(&map), "r"(8), "r"(1), "r"(shared_address(s)) : "memory");
                commit();
                wait_read();
            }
        }
    """)
    kernels, symbol = program(code, "k", "sm_90a")
    tensor = np.ones((4, 20), np.float32)
    y = kernels.memory.allocate(tensor, "y")
    launch((kernels, symbol), ["map"], 2, 64, TensorMap.of_array(tensor, y.base, (16, 4)).encode())
    expected = np.ones((4, 20), np.float32)
    expected[1:, 8:] += 2 * np.arange(64, dtype=np.float32).reshape(4, 16)[:3, :12]
    assert (y.buffer.view(np.float32).reshape(4, 20) == expected).all()


# --- clusters ---

TO_OTHERS = """
    __global__ void __cluster_dims__(2, 1, 1) k(int* y) {
        __shared__ __align__(16) int s[32], from[32];
        __shared__ unsigned long long full;
        s[threadIdx.x] = 7;
        from[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
        if (threadIdx.x == 0) init(&full, 1), expect(&full, 128);
        fence();
        cluster_sync();
        if (threadIdx.x == 0)
            asm volatile("COPY [%0], [%1], 128, [%2];" :: "r"(of_rank(s, rank() ^ 1)), "r"(shared_address(from)),
                         "r"(of_rank(&full, rank() ^ 1)) : "memory");
        wait(&full, 0);
        y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
        cluster_sync();
    }
"""
COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
ADD = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.s32"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("copy", [COPY, ADD])
def test_a_copy_to_another_block(copy, seed):
    kernel = TO_OTHERS.replace("COPY", copy)
    y = np.zeros((4, 32), np.int32)
    run(right(kernel), "k", 4, 32, y, seed=seed, **HOPPER)
    assert (y == 7 * (copy == ADD) + 100 * np.array([1, 0, 3, 2])[:, None] + np.arange(32)).all()
    at = "y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];"
    code = twin(kernel, "wait(&full, 0);", "").replace(at, at + "  // here")
    fails(Race, code, "k", 4, 32, y, says=[IN_FLIGHT], seed=seed, **HOPPER)
    code = twin(kernel, "    fence();\n", "")
    fails(Race, code, "k", 4, 32, y, says=[UNFENCED], seed=seed, **HOPPER)
    code = twin(kernel, '"r"(of_rank(&full, rank() ^ 1))', '"r"(of_rank(&full, rank()))')
    says = ["reports to an mbarrier of another"]
    fails(OutOfBounds, code, "k", 4, 32, y, says=says, seed=seed, **HOPPER)
    # overwritten while it may still be read
    code = twin(kernel, "        wait(&full, 0);".strip(), "from[threadIdx.x] = 0;  // here")
    says = ["write shared memory that a bulk copy may still read, with no wait for the mbarrier"]
    fails(Race, code, "k", 4, 32, y, says=says, seed=seed, **HOPPER)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_of_another_block_that_is_not_waited_for(seed):
    kernel = """
        __global__ void __cluster_dims__(2, 1, 1) k(int* y) {
            __shared__ int s[32];
            __shared__ unsigned long long full;
            if (threadIdx.x == 0) init(&full, 1), expect(&full, 128);
            cluster_sync();
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         :: "r"(of_rank(s + threadIdx.x, rank() ^ 1)), "r"(100 * blockIdx.x + threadIdx.x),
                            "r"(of_rank(&full, rank() ^ 1)) : "memory");
            wait(&full, 0);
            y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];
            cluster_sync();
        }
    """
    y = np.zeros((2, 32), np.int32)
    run(right(kernel), "k", 2, 32, y, seed=seed, **HOPPER)
    assert (y == 100 * np.array([1, 0])[:, None] + np.arange(32)).all()
    at = "y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x];"
    code = twin(kernel, "wait(&full, 0);", "").replace(at, at + "  // here")
    fails(Race, code, "k", 2, 32, y, says=[IN_FLIGHT], seed=seed, **HOPPER)


def test_shared_addresses_bear_the_rank_of_the_block():
    """From bit 24 on, in the 32-bit addresses and in generic ones; mapa puts another one in its place."""
    code = right("""
        __global__ void __cluster_dims__(4, 1, 1) k(unsigned* y) {
            __shared__ int s[4];
            extern __shared__ int dynamic[];
            unsigned direct, ranks;
            asm volatile("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(direct) : "l"(s + 1));
            asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(ranks) : "r"(of_rank(s, 3 - rank())));
            s[1] = rank(), dynamic[2] = 10 + rank();
            cluster_sync();
            unsigned* to = y + 6 * blockIdx.x;
            to[0] = shared_address(s), to[1] = direct, to[2] = of_rank(s, 3 - rank()), to[3] = ranks;
            to[4] = s[1], to[5] = dynamic[2];
        }
    """)
    y = np.zeros((8, 6), np.uint32)
    run(code, "k", 8, 1, y, shared=64, **HOPPER)
    rank = np.arange(8) % 4
    assert (y[:, 0] >> 24 == rank).all() and (y[:, 2] >> 24 == 3 - rank).all()
    assert (y[:, 0] & 0xFFFFFF == y[:, 2] & 0xFFFFFF).all() and (y[:, 1] == y[:, 0] + 4).all()
    assert (y[:, 3] == 3 - rank).all() and (y[:, 4] == rank).all() and (y[:, 5] == 10 + rank).all()
    run(code, "k", 8, 1, y, shared=64, cluster=(4, 1, 1), **HOPPER)


FOREIGN = """
    __global__ void __cluster_dims__(2, 1, 1) k(int* y) {
        __shared__ unsigned given;
        __shared__ __align__(16) int s[32];
        __shared__ unsigned long long bar;
        s[threadIdx.x] = threadIdx.x;
        if (threadIdx.x == 0) init(&bar, 1);
        cluster_sync();
        if (threadIdx.x == 0)
            asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(of_rank(&given, rank() ^ 1)), "r"(ADDRESS) : "memory");
        cluster_sync();
        unsigned at = given, v = 0;
        USE
        y[blockIdx.x * 32 + threadIdx.x] = v;
        cluster_sync();
    }
"""
USES = {
    "load": ("shared_address(s)", 'asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at + 4 * threadIdx.x));'),
    "store": ("shared_address(s)", 'asm volatile("st.shared.u32 [%0], %1;" :: "r"(at + 4 * threadIdx.x), "r"(v));'),
    "atomic": ("shared_address(s)", 'asm volatile("red.shared.add.u32 [%0], 1;" :: "r"(at));'),
    "arrival": (
        "shared_address(&bar)",
        'if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at));',
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_address_of_another_block_used_as_the_own(use):
    address, instruction = USES[use]
    kernel = FOREIGN.replace("ADDRESS", address).replace("USE", instruction + "  // here")
    y = np.zeros((2, 32), np.int32)
    says = [OF_ANOTHER, "the address bears the rank of the block that took it", "rank 1, in the block of rank 0"]
    fails(OutOfBounds, right(kernel), "k", 2, 32, y, says=says, **HOPPER)
    own = right(kernel).replace("at = given", "at = (given & 0xffffff) | rank() << 24").replace("  // here", "")
    run(own.replace('[%0], %1;" :: "r"(at + 4', '[%0], %1;" :: "r"(at + 4'), "k", 2, 32, y, **HOPPER)


ARRIVAL = """
    __global__ void __cluster_dims__(2, 1, 1) k(int* y) {
        __shared__ int s[32];
        __shared__ unsigned long long bar;
        if (threadIdx.x == 0) init(&bar, 32);
        cluster_sync();
        asm volatile("st.shared::cluster.u32 [%0], %1;"
                     :: "r"(of_rank(s + threadIdx.x, rank() ^ 1)), "r"(rank()) : "memory");
        arrive_at(of_rank(&bar, rank() ^ 1));
        wait(&bar, 0);
        y[blockIdx.x * 32 + threadIdx.x] = s[31 - threadIdx.x];
        cluster_sync();
    }
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_at_another_block(seed):
    y = np.zeros((2, 32), np.int32)
    run(right(ARRIVAL), "k", 2, 32, y, seed=seed, **HOPPER)
    assert (y == [[1], [0]]).all()
    code = twin(ARRIVAL, "arrive_at(of_rank(&bar, rank() ^ 1));", "if (rank()) arrive_at(of_rank(&bar, 1));")
    says = ["deadlock", "lacks 32 of 32 arrivals", "block (0,0,0)"]
    fails(Deadlock, code, "k", 2, 32, y, says=says, seed=seed, **HOPPER)
    code = twin(ARRIVAL, "of_rank(&bar, rank() ^ 1)", "of_rank(&bar, 5)").replace("arrive_at(", "arrive_at(", 1)
    fails(OutOfBounds, code, "k", 2, 32, y, says=["of a block that the cluster has not"], seed=seed, **HOPPER)


# --- products of matrices ---

PRODUCT = """
    __device__ unsigned long long descriptor(const void* p, int leading, int stride) {
        return (unsigned long long)((shared_address(p) & 0x3ffff) >> 4) | (unsigned long long)(leading >> 4) << 16
            | (unsigned long long)(stride >> 4) << 32;
    }
    __device__ void multiply(float (&d)[4], const void* a, const void* b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(descriptor(a, 128, 256)),
                       "l"(descriptor(b, 128, 256)));
    }
    __global__ void CLUSTER k(const __half* x, float* y) {
        __shared__ __align__(128) __half a[64 * 16], b[8 * 16];
        for (int i = threadIdx.x; i < 64 * 16; i += 128) a[i] = x[i];
        b[threadIdx.x] = x[1024 + threadIdx.x];
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        float d[4] = {};
        for (int i = 0; i < 2; i++) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            multiply(d, a, b);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            for (int j = 0; j < 4; j++) d[j] += 1;
        }
        __syncthreads();
        a[threadIdx.x] = b[0];
        for (int j = 0; j < 4; j++) y[4 * threadIdx.x + j] = d[j];
    }
"""
WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");\n'
FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
PROXY = 'asm volatile("fence.proxy.async;" ::: "memory");\n'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");\n'
EARLY = "read of a matrix product's sum that may not be there yet, with no wgmma.wait_group in between"
PRODUCTS = {
    "no fence": (FENCE, "", "multiply(d, a, b);", "registers that were accessed before it, with no wgmma.fence in between"),
    "a fence for the first alone": (FENCE, f"if (!i) {FENCE}", "multiply(d, a, b);", "with no wgmma.fence in between"),
    "no wait": (WAIT, "\n", "d[j] += 1;", EARLY),
    "no group": (COMMIT, "\n", "d[j] += 1;", EARLY),
    "no proxy fence": (PROXY, "\n", "multiply(d, a, b);", "a matrix product " + UNFENCED),
    "no barrier": (PROXY + "    __syncthreads();", PROXY, "multiply(d, a, b);", "a matrix product " + UNORDERED),
    "overwritten": (
        "for (int j = 0; j < 4; j++) d[j] += 1;",
        "",
        "a[threadIdx.x] = b[0];",
        "write shared memory that a matrix product may still read, with no wgmma.wait_group in between",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0])
def test_products_that_are_waited_for(seed):
    x = np.random.default_rng(5).integers(-3, 4, 1152).astype(np.float16)
    y = np.zeros((128, 4), np.float32)
    run(right(PRODUCT.replace("CLUSTER", "")), "k", 2, 128, x, y, seed=seed, **HOPPER)
    a, b = (
        part.reshape(-1, 2, 8, 8).transpose(0, 2, 1, 3).reshape(-1, 16).astype(np.float32)
        for part in (x[:1024], x[1024:])
    )
    expected = 2 * (a @ b.T) + 2
    thread, column = np.arange(128)[:, None], np.arange(4)
    row = 16 * (thread // 32) + thread % 32 // 4 + column // 2 * 8
    assert (y == expected[row, thread % 4 * 2 + column % 2]).all()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_without(name, seed):
    old, new, at, says = PRODUCTS[name]
    kernel = PRODUCT.replace("CLUSTER", "")
    if name == "overwritten":
        kernel = kernel.replace("i < 2", "i < 1").replace(WAIT, "").replace("y[4 * threadIdx.x + j] = d[j]", "y[j] = j")
    code = twin(kernel, old, new).replace(at, at + "  // here")
    if name == "no wait" or name == "no group":
        code = code.replace("  // here", "").replace(at, "\n{ " + at + "  // here\n}")
    x = np.zeros(1152, np.float16)
    fails(Race, code, "k", 1, 128, x, np.zeros((128, 4), np.float32), says=[says], seed=seed, **HOPPER)


def test_a_descriptor_with_the_rank_in_it():
    """It belongs to no field of the descriptor for which it is meant: the product reads elsewhere, or outside."""
    kernel = PRODUCT.replace("CLUSTER", "__cluster_dims__(2, 1, 1)")
    x, y = np.arange(1152).astype(np.float16), np.zeros((2, 128, 4), np.float32)
    run(right(kernel.replace("4 * threadIdx", "512 * blockIdx.x + 4 * threadIdx")), "k", 2, 128, x, y, **HOPPER)
    assert (y[0] == y[1]).all() and y[0].any()
    with pytest.raises((OutOfBounds, Race)):
        run(twin(kernel, "(shared_address(p) & 0x3ffff) >> 4", "shared_address(p) >> 4"), "k", 2, 128, x, y, **HOPPER)


def test_without_checks():
    """Then nothing is told: what is not waited for is read at the last moment, and holds what was written meanwhile."""
    for name, value in (("no fence", np.arange(64)), ("no wait", np.full(64, -1))):
        old, new, _, _ = STORES[name]
        y = np.zeros(64, np.float32)
        run(twin(STORE, old, new), "k", 1, 64, y, np.zeros(1, np.float32), check=False, **HOPPER)
        assert (y == value).all()
    for old, new, _, _ in PRODUCTS.values():
        y = np.zeros((128, 4), np.float32)
        code = twin(PRODUCT.replace("CLUSTER", ""), old, new)
        run(code, "k", 1, 128, np.zeros(1152, np.float16), y, check=False, **HOPPER)
        assert (y == (0 if "d[j] += 1" in old else 2)).all()
