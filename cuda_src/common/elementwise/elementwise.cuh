// out[i] = f(in0[i], in1[i], ...), computed in acc_t<T>, for n elements laid out alike.
#pragma once

#include "common/core/vector.cuh"

// Grid: ceil(n / (blockDim.x * kVecWidth<T>)), one dimension. Each thread owns a vector, and the last one what is left. A
// pointer off 16 bytes (a view such as x[1:]) sends the whole launch down the scalar path, where threads stride over the
// elements.
template <typename T, typename F, typename... In>
__device__ __forceinline__ void elementwise(long long n, F f, T* out, const In*... in) {
  constexpr int W = kVecWidth<T>;
  const long long at = global_thread() * W;
  const bool all_aligned = is_aligned16(out) && (is_aligned16(in) && ...);
  if (all_aligned && at + W <= n) {
    Vec<T, W> result;
    [&](Vec<In, W>... loaded) {
#pragma unroll
      for (int k = 0; k < W; ++k) result.data[k] = from_acc<T>(f(to_acc(loaded.data[k])...));
    }(load_vec<In, W>(in + at)...);
    store_vec<T, W>(out + at, result);
    return;
  }
  const long long first = all_aligned ? at : global_thread(), step = all_aligned ? 1 : global_threads();
#pragma unroll 1
  for (long long i = first; i < n; i += step) out[i] = from_acc<T>(f(to_acc(in[i])...));
}
