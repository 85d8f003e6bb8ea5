// What kernels outside this library include: element types and what they are computed in, 16-byte vectors, reductions over
// a warp and a block, elementwise loops.
#pragma once

#include "common/core/types.cuh"
#include "common/core/vector.cuh"
#include "common/elementwise/elementwise.cuh"
#include "common/reduce/warp_block.cuh"
