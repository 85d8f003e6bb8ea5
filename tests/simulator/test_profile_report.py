"""What the profile counts, for accesses whose sectors, banks and threads follow from their addresses."""

import functools

import numpy as np
import pytest
import torch

import cupyops
from cupyops._kernel.compile import compiler, source
from cupyops.simulator import Pointer, Program
from cupyops.simulator.machine.faults import Listing
from cupyops.simulator.profile import Profile
from cupyops.simulator.translate.ptx import Instruction, Place

TEXT = r"""
#include "helper.cuh"
extern "C" __global__ void strided(const float* x, float* y, int stride, int offset) {
  y[threadIdx.x] = x[threadIdx.x * stride + offset];
}
extern "C" __global__ void wide(const float4* x, float4* y, int stride) {
  y[threadIdx.x] = x[threadIdx.x * stride];
}
extern "C" __global__ void banks(float* y, int stride) {
  __shared__ float s[32 * 33];
  s[threadIdx.x * stride] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[(31 - threadIdx.x) * stride];
}
extern "C" __global__ void wide_banks(float4* y, int stride) {
  __shared__ float4 rows[32 * 9];
  rows[threadIdx.x * stride] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = rows[(31 - threadIdx.x) * stride];
}
extern "C" __global__ void copied(const float* x, float* y) {
  __shared__ float s[128];
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(s + 4 * threadIdx.x));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(x + 4 * threadIdx.x));
  asm volatile("cp.async.wait_all;");
  y[threadIdx.x] = s[4 * threadIdx.x];
}
extern "C" __global__ void guarded(const float* x, float* y) {
  if (threadIdx.x % 4 == 0)
    y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void looped(const float* x, float* y) {
  float sum = 0;
#pragma unroll 1
  for (int k = 0; k < 3; ++k)
    sum += x[threadIdx.x * (k + 1)];
  y[threadIdx.x] = sum;
}
extern "C" __global__ void calls(const float* x, float* y) {
  y[threadIdx.x] = slow(x[threadIdx.x]);
}
"""
HELPER = """
__device__ float slow(float v) {
  for (int i = 0; i < 9; ++i)
    v = v * 1.5f + 0.5f;
  return v;
}
"""
TREE = source.Source("k.cu", TEXT, None, {"helper.cuh": HELPER})


@functools.cache
def ptx():
    """The PTX of all kernels."""
    return compiler.compile(TREE, "strided", "sm_80")[0].ptx


def profile(kernel, *arguments, threads=32, grid=1):
    """The profile of a launch; a number stands for an array of so many floats."""
    program = Program(ptx(), sources={TREE.name: TEXT, **TREE.includes})
    values = [
        Pointer(program.memory.allocate(np.zeros(value, np.float32))) if isinstance(value, int) else value
        for value in arguments
    ]
    return program.launch(kernel, (grid,), (threads,), values, check=False, profile=True).profile


def of(found, piece, file="k.cu", text=TEXT):
    number = next(index for index, line in enumerate(text.splitlines(), 1) if piece in line)
    return found.by_line()[file, number]


@pytest.mark.parametrize(
    ("stride", "offset", "sectors", "least"),
    [
        (1, 0, 4, 4),
        (1, 1, 5, 4),
        (1, 8, 4, 4),
        (2, 0, 8, 4),
        (4, 0, 16, 4),
        (8, 0, 32, 4),
        (32, 0, 32, 4),
        (0, 0, 1, 1),
    ],
)
def test_sectors_of_a_strided_load(stride, offset, sectors, least):
    found = profile("strided", 32 * 32 + 8, 32, np.int32(stride), np.int32(offset))
    both = of(found, "x[threadIdx.x * stride + offset]").own  # the load, and the store's 4 sectors
    assert (both.requests, both.sectors, both.least_sectors) == (2, sectors + 4, least + 4)


def test_sectors_are_counted_for_each_warp():
    own = of(profile("strided", 128, 128, np.int32(1), np.int32(0), threads=64, grid=2), "x[threadIdx.x * stride").own
    # of 2 blocks of 2 warps, each with a load and a store of 4 sectors
    assert (own.requests, own.sectors) == (8, 32)


@pytest.mark.parametrize(("stride", "sectors"), [(1, 16), (2, 32), (4, 32)])
def test_a_load_of_sixteen_bytes_needs_sixteen_sectors_at_least(stride, sectors):
    own = of(profile("wide", 32 * 4 * 4, 32 * 4, np.int32(stride)), "x[threadIdx.x * stride]").own
    assert (own.requests, own.sectors, own.least_sectors) == (2, sectors + 16, 32)


@pytest.mark.parametrize(
    ("stride", "wavefronts"), [(0, 1), (1, 1), (2, 2), (4, 4), (16, 16), (32, 32), (33, 1), (31, 1)]
)
def test_banks_of_a_strided_store(stride, wavefronts):
    own = of(profile("banks", 32, np.int32(stride)), "s[threadIdx.x * stride] = y").own
    assert (own.shared_requests, own.wavefronts, own.least_wavefronts) == (1, wavefronts, 1)


@pytest.mark.parametrize(("stride", "wavefronts"), [(1, 4), (2, 8), (8, 32), (9, 4)])
def test_sixteen_bytes_a_lane_take_four_passes_at_least(stride, wavefronts):
    own = of(profile("wide_banks", 128, np.int32(stride)), "rows[threadIdx.x * stride] = y").own
    assert (own.shared_requests, own.wavefronts, own.least_wavefronts) == (1, wavefronts, 4)


def test_an_asynchronous_copy_is_one_access():
    own = of(profile("copied", 128, 32), "cp.async.cg").own
    assert (own.requests, own.sectors, own.least_sectors) == (1, 16, 16)
    assert (own.shared_requests, own.wavefronts, own.least_wavefronts) == (1, 4, 4)


def test_each_turn_of_a_loop_counts():
    own = of(profile("looped", 96, 32), "sum += x[").own
    assert (own.requests, own.sectors, own.least_sectors) == (3, 4 + 8 + 12, 3 * 4)


def test_line_zero_is_no_line():
    """The compiler's way to say that an instruction belongs to none: it counts for the line around it, if there is one."""
    places = [Place(1, 0, Place(1, 5)), Place(1, 0), None, Place(1, 5)]
    instructions = [Instruction("mov", ("u32",), (), place=place) for place in places]
    found = Profile(Listing("k", instructions, {1: "k.cu"}, {"k.cu": TEXT}))
    for pc in range(4):
        found.instructions[pc].warps += 10
    assert {key: line.own.warps for key, line in found.by_line().items()} == {("k.cu", 5): 20}


def test_divergence():
    own = of(profile("guarded", 64, 64, threads=64), "y[threadIdx.x] = x[threadIdx.x];").own
    assert own.threads / own.warps == pytest.approx(8)
    # 8 lanes of each of 2 warps, 16 bytes apart: 4 sectors for a load and 4 for a store, where 1 would do
    assert (own.requests, own.sectors, own.least_sectors) == (4, 16, 4)


def test_a_block_that_is_no_multiple_of_a_warp():
    own = of(profile("strided", 40, 40, np.int32(1), np.int32(0), threads=40), "x[threadIdx.x * stride").own
    assert own.threads / own.warps == 20
    assert (own.requests, own.sectors) == (4, 2 * (4 + 1))


def test_a_line_has_its_own_counts_and_with_those_that_it_calls():
    found = profile("calls", 32, 32)
    call, body = of(found, "= slow(x"), of(found, "v = v * 1.5f", "helper.cuh", HELPER)
    assert body.own.warps == body.total == 9  # unrolled: nine multiply-adds
    assert call.total == call.own.warps + 9
    assert found.issued == sum(counts.warps for counts in found.instructions.values())


def test_a_trace_has_the_profile_of_a_launch():
    """Profile by line of a launch in `simulate(profile=True)`; None for other launches."""
    kernel = cupyops.Kernel(
        "__global__ void spread(const float* x, float* y) {\n  y[threadIdx.x] = x[8 * threadIdx.x];\n}", "spread"
    )
    x, y = torch.zeros(256), torch.empty(32)
    with cupyops.simulate(profile=True), cupyops.trace() as trace:
        kernel[1, 32](x, y)
    with cupyops.simulate(), trace:
        kernel[1, 32](x, y)
    first, second = trace.launches()
    assert second.profile is None and first.instructions == second.instructions
    total = first.profile.total
    assert (total.requests, total.sectors, total.least_sectors, total.wavefronts) == (2, 32 + 4, 4 + 4, 0)
    head, *lines = str(first.profile).splitlines()
    assert head.split("  ")[0].strip() == "line" and "wavefronts" in head
    (line,) = (line for line in lines if line.lstrip().startswith("2 "))
    assert "18 (4)" in line and line.endswith("y[threadIdx.x] = x[8 * threadIdx.x];")
