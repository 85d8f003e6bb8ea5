// The map of a variant's mask. The text that includes this defines attention::Variant.
#include "attention/map.cuh"

// Grid: a block for each cell of each batch and head that the mask tells apart, at most 2^31 - 1. Block: any whole warps.
__global__ void attention_map_cells(unsigned char* __restrict__ cells, const __grid_constant__ attention::Sizes sizes,
                                    const __grid_constant__ attention::Cells of, const void* __restrict__ c0,
                                    const void* __restrict__ c1, const void* __restrict__ c2,
                                    const void* __restrict__ c3, const int* __restrict__ lists,
                                    const __grid_constant__ attention::Given given) {
  attention::look(cells, sizes, of, attention::Variant(c0, c1, c2, c3, lists, given));
}
