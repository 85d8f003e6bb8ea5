// y            = sum_b loss_b, or for the mean sum_b loss_b / sum_b weight_b, over the blocks b of the kernel launched
// before total_weight = sum_b weight_b
//
// cross_entropy and nll_loss launch it to overlap that kernel. Reached on an H200: 3 us, of which the overlap hides one.
#include "loss/losses.cuh"

// Grid: 1. Block: one dimension, a multiple of 32. Adds the `count` pairs of `partials`, in the same order every time.
template <typename T>
__global__ void loss_finalize(const acc_t<T>* __restrict__ partials, T* __restrict__ y,
                              acc_t<T>* __restrict__ total_weight, int count, int reduction) {
  add_partials(partials, count, reduction, y, total_weight);
}
