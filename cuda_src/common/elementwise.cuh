// out[i] = f(in0[i], in1[i], ...), computed in acc_t<T>, for n elements laid out alike.
#pragma once

#include "common/vec.cuh"

// Grid: any, one dimension; ceil(n / (blockDim.x * kVecWidth<T>)) blocks give each thread one vector. Each thread owns
// the vectors, then the tail elements, of its grid-stride. A pointer off 16 bytes (a view such as x[1:]) sends the whole
// launch down the scalar path.
template <typename T, typename F, typename... In>
__device__ __forceinline__ void elementwise(long long n, F f, T* out, const In*... in) {
  constexpr int W = kVecWidth<T>;
  const bool vectors_fit = is_aligned16(out) && (is_aligned16(in) && ...);
  const long long vectors = vectors_fit ? n / W : 0;
  for (long long v = global_thread(); v < vectors; v += global_threads()) {
    Vec<T, W> result;
    [&](Vec<In, W>... loaded) {
#pragma unroll
      for (int k = 0; k < W; ++k) result.data[k] = from_acc<T>(f(to_acc(loaded.data[k])...));
    }(load_vec<In, W>(in + v * W)...);
    store_vec<T, W>(out + v * W, result);
  }
  for (long long i = vectors * W + global_thread(); i < n; i += global_threads()) {
    out[i] = from_acc<T>(f(to_acc(in[i])...));
  }
}
