// y = a + b
// grad_a = grad_b = grad_y
#include "cupyops.cuh"

// Grid: one thread for each of the n elements. Thread i owns y[i].
template <typename T> __global__ void vector_add_fwd(const T* a, const T* b, T* y, long long n) {
  const long long i = global_thread();
  if (i < n) y[i] = from_acc<T>(to_acc(a[i]) + to_acc(b[i]));
}

// Grid: one thread for each of the n elements. Thread i owns grad_a[i] and grad_b[i].
template <typename T> __global__ void vector_add_bwd(const T* grad_y, T* grad_a, T* grad_b, long long n) {
  const long long i = global_thread();
  if (i < n) grad_a[i] = grad_b[i] = grad_y[i];
}
