"""Copies: cp.async, bulk copies with mbarriers, tiles of tensor maps, and shared memory across a cluster."""

from __future__ import annotations

import itertools

import numpy as np

from .case import Argument, Array, Map, Section

_SHARED = """  extern __shared__ uint4 raw[];
  unsigned t = threadIdx.x, base = ((unsigned)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
  unsigned char* shared = (unsigned char*)raw + (base - (unsigned)__cvta_generic_to_shared(raw));
  for (unsigned i = t; i < BYTES; i += blockDim.x) shared[i] = 0xA5;
"""
_MBARRIER = """  __shared__ __align__(8) unsigned long long barrier;
  unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
  if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
"""
_WAIT = """  unsigned done = 0;
  while (!done) asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                             : "=r"(done) : "r"(bar) : "memory");
"""
_OUT = "  __syncthreads();\n  for (unsigned i = t; i < BYTES; i += blockDim.x) out[i] = shared[i];"
_PRELUDE = "struct __align__(64) TensorMap { unsigned long long words[16]; };"


def copies() -> Section:
    """cp.async, bulk copies and what clusters share."""
    section = Section("copy")
    source = np.random.default_rng(1).integers(0, 256, 1 << 14, np.uint8)
    for size, flavour in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        _cp_async(section, source, size, flavour)
    _bulk_load(section, source)
    _bulk_store(section, source)
    _cluster(section, source)
    _bulk_to_neighbour(section, source)
    return section


def _cp_async(section: Section, source: np.ndarray, size: int, flavour: str) -> None:
    """Groups, and sources shorter than the copy, the rest of which is zero."""
    instruction = f"cp.async.{flavour}.shared.global"
    body = _SHARED + f"""  __syncthreads();
  unsigned place = t * {size};
  asm volatile("{instruction} [%0], [%1], {size};" :: "r"(base + place), "l"(source + ((t * 37) % 128) * 16) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("{instruction} [%0], [%1], {size}, %2;"
               :: "r"(base + 4096 + place), "l"(source + t * 16), "r"(lengths[t] % {size + 1}) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
""" + _OUT  # fmt: skip
    lengths = np.random.default_rng(2).integers(0, 1 << 16, 128).astype(np.uint32)
    parameters = "const unsigned char* source, const unsigned* lengths, unsigned char* out"
    kernel = section.kernel(parameters, body.replace("BYTES", "8192"))
    result = Array(np.zeros(8192, np.uint8), True)
    section.add(f"{instruction} {size} bytes", kernel, [Array(source), Array(lengths), result], shared=8192 + 1024)


def _bulk_load(section: Section, source: np.ndarray) -> None:
    body = _SHARED + _MBARRIER + """  if (t == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 4112;" :: "r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];"
                 :: "r"(base + 32), "l"(source + 48), "r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                 :: "r"(base + 6000), "l"(source + 9008), "r"(bar) : "memory");
  }
""" + _WAIT + _OUT  # fmt: skip
    kernel = section.kernel("const unsigned char* source, unsigned char* out", body.replace("BYTES", "8192"))
    arguments = [Array(source), Array(np.zeros(8192, np.uint8), True)]
    section.add("cp.async.bulk.shared::cluster.global", kernel, arguments, shared=8192 + 1024)


def _bulk_store(section: Section, source: np.ndarray) -> None:
    body = _SHARED + """  for (unsigned i = t; i < 8192; i += 128) shared[i] = source[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 4112;"
                 :: "l"(out + 64), "r"(base + 16) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }"""  # fmt: skip
    kernel = section.kernel("const unsigned char* source, unsigned char* out", body.replace("BYTES", "8192"))
    arguments = [Array(source), Array(np.full(8192, 0x5A, np.uint8), True)]
    section.add("cp.async.bulk.global.shared::cta", kernel, arguments, shared=8192 + 1024)


_CLUSTER = "__global__ __cluster_dims__(4, 1, 1)"


def _cluster(section: Section, source: np.ndarray) -> None:
    """Each block reads its neighbours' shared memory and adds into it; ranks and special registers."""
    body = (
        _SHARED
        + """  unsigned rank, blocks, cluster, other, found, of_other;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
  __syncthreads();
  unsigned* words = (unsigned*)shared;
  words[t] = source[blockIdx.x * 128 + t];
  words[128 + t] = 1000 * blockIdx.x;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(base + 4 * t), "r"((rank + 1 + t % 3) % blocks));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(found) : "r"(other) : "memory");
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(of_other) : "r"(other));
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" :: "r"(other + 512), "r"(t + 1) : "memory");
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  unsigned i = blockIdx.x * 128 + t;
  out[4 * i] = found;
  out[4 * i + 1] = words[128 + t];
  out[4 * i + 2] = of_other;
  out[4 * i + 3] = rank + 16 * blocks + 256 * cluster;"""
    )
    kernel = section.kernel("const unsigned* source, unsigned* out", body.replace("BYTES", "2048"), _CLUSTER)
    words = np.random.default_rng(4).integers(0, 1 << 32, 8 * 128, np.uint64).astype(np.uint32)
    result = Array(np.zeros(8 * 128 * 4, np.uint32), True)
    section.add(
        "mapa ld.shared::cluster red barrier.cluster", kernel, [Array(words), result], grid=8, shared=2048 + 1024
    )


def _bulk_to_neighbour(section: Section, source: np.ndarray) -> None:
    """A bulk copy into the next block's shared memory, which reports to that block's mbarrier."""
    body = _SHARED + _MBARRIER + """  for (unsigned i = t; i < 1024; i += 128) shared[i] = source[blockIdx.x * 1024 + i];
  asm volatile("fence.proxy.async;" ::: "memory");
  if (t == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" :: "r"(bar) : "memory");
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  if (t == 0) {
    unsigned rank, there, report;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(base + 1024), "r"((rank + 1) % 4));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(report) : "r"(bar), "r"((rank + 1) % 4));
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
                 :: "r"(there), "r"(base), "r"(report) : "memory");
  }
""" + _WAIT + """  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  for (unsigned i = t; i < 1024; i += 128) out[blockIdx.x * 1024 + i] = shared[1024 + i];"""  # fmt: skip
    kernel = section.kernel("const unsigned char* source, unsigned char* out", body.replace("BYTES", "2048"), _CLUSTER)
    arguments = [Array(source[:8192]), Array(np.zeros(8192, np.uint8), True)]
    section.add("cp.async.bulk.shared::cluster.shared::cta", kernel, arguments, grid=8, shared=2048 + 1024)


# --- tiles ---------------------------------------------------------------------------------------------------------

_MAP = "const __grid_constant__ TensorMap map"
_SHAPES = {1: (100,), 2: (20, 96), 3: (5, 12, 64), 4: (3, 4, 10, 32), 5: (3, 2, 4, 8, 32)}  # outermost first
_BOXES = {1: (32,), 2: (32, 9), 3: (32, 5, 3), 4: (16, 4, 3, 2), 5: (16, 4, 2, 2, 2)}  # innermost first


def tiles() -> Section:
    """Tiled loads and stores of 1 to 5 dimensions: inside, across each edge, outside; swizzles, fills, element strides."""
    section = Section("tile", prelude=_PRELUDE)
    for rank in range(1, 6):
        for element in ("f16", "f32"):
            for place in _places(rank):
                _tile(section, rank, element, _BOXES[rank], place)
    for span, offset in itertools.product((32, 64, 128), (0, 128, 384)):
        width = span // 2
        _tile(section, 2, "bf16", (width, 16), (8, 5), span, offset=offset)
        _tile(section, 3, "f16", (width, 4, 3), (8, 10, 3), span, offset=offset)
    for element in ("f16", "bf16", "f32"):
        _tile(section, 2, element, (32, 9), (80, -3), fill="nan")
    for steps in ((1, 2), (1, 3)):
        _tile(section, 2, "f32", (32, 9), (16, 1), steps=steps)
    _tile(section, 3, "f16", (16, 6, 4), (0, 1, 0), steps=(1, 2, 2))
    for element, at in itertools.product(("f16", "f32"), (3, -3, 98)):  # bytes that are no multiple of 16
        _tile(section, 1, element, _BOXES[1], (at,))
        _tile(section, 2, element, _BOXES[2], (at, 0))
    return section


def _places(rank: int) -> list[tuple[int, ...]]:
    """Coordinates, innermost first: within, before the first, over the last, beyond everything."""
    inner, *outer = _SHAPES[rank][::-1]
    over = (inner // 8 * 8 - 8, *(size - 2 for size in outer))
    return [(0,) * rank, (-8,) + (-1,) * (rank - 1), over, (200,) + (0,) * (rank - 1)]


def _tile(
    section: Section,
    rank: int,
    element: str,
    box: tuple[int, ...],
    place: tuple[int, ...],
    swizzle: int = 0,
    *,
    offset: int = 0,
    fill: str = "zero",
    steps: tuple[int, ...] = (),
) -> None:
    """A load of the tile at `place`, and a store of other bytes to it."""
    size = 4 if element == "f32" else 2
    shape = _SHAPES[rank]
    rng = np.random.default_rng(rank)
    tensor = rng.integers(0, 0x7000, shape).astype(f"u{size}")
    strides = tuple(int(step) for step in tensor.strides[-2::-1])
    steps = steps or (1,) * rank
    map_ = Map(2, element, shape[::-1], strides, box, steps, swizzle, fill)
    counts = [-(-extent // step) for extent, step in zip(box, (1, *steps[1:]))]
    name = f"{rank}d {element} box {box} at {place}"
    name += f" swizzle {swizzle} offset {offset}" * bool(swizzle) + f" fill {fill}" * (fill != "zero")
    name += f" steps {steps}" * (set(steps) != {1})
    common = f"{_MAP}, const int* at"
    load = section.kernel(f"{common}, const void* tensor, unsigned char* out, int offset, int bytes", _load(rank))
    place_argument = Array(np.array(place, np.int32).view(np.uint32))
    # fills with NaN are compared as floats: CUDA does not say which NaN it is
    result = Array(np.zeros(16384 // size, tensor.dtype), True, element if fill == "nan" else "")
    arguments: list[Argument] = [map_, place_argument, Array(tensor), result, offset, int(np.prod(counts)) * size]
    section.add(f"cp.async.bulk.tensor load {name}", load, arguments, shared=16384 + 1024)
    if fill == "zero":
        store = section.kernel(f"{common}, void* tensor, const unsigned char* in, int offset", _store(rank))
        other = Array(rng.integers(0, 256, 16384, np.uint8))
        arguments = [map_, place_argument, Array(tensor, True), other, offset]
        section.add(f"cp.async.bulk.tensor store {name}", store, arguments, shared=16384 + 1024)


def _coordinates(rank: int, first: int) -> tuple[str, str]:
    """As operands of the instruction, and as its inputs."""
    names = ", ".join(f"%{first + i}" for i in range(rank))
    return f"{{{names}}}", ", ".join(f'"r"(at[{i}])' for i in range(rank))


def _load(rank: int) -> str:
    names, values = _coordinates(rank, 3)
    instruction = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    body = _SHARED + _MBARRIER + f"""  if (t == 0) {{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
    asm volatile("{instruction} [%0], [%1, {names}], [%2];"
                 :: "r"(base + offset), "l"(&map), "r"(bar), {values} : "memory");
  }}
""" + _WAIT + _OUT  # fmt: skip
    return body.replace("BYTES", "16384")


def _store(rank: int) -> str:
    names, values = _coordinates(rank, 2)
    instruction = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    body = _SHARED + f"""  for (unsigned i = t; i < 16384; i += 128) shared[i] = in[i];
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t == 0) {{
    asm volatile("{instruction} [%0, {names}], [%1];" :: "l"(&map), "r"(base + offset), {values} : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }}"""  # fmt: skip
    return body.replace("BYTES", "16384")
