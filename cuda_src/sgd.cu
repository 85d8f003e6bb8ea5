// grad   = grad / grad_scale                                   where a GradScaler has scaled it; written back
// g      = (maximize ? -grad : grad) + weight_decay * param
// buffer = first ? g : momentum * buffer + (1 - dampening) * g
// g      = nesterov ? g + momentum * buffer : buffer           without momentum g stays
// param  = param - lr * g
//
// All parameters of a device and dtype in one launch. Bytes per element: 3 x sizeof(T), 5 x sizeof(T) with momentum;
// at most 10 flops.
#include "common/vec.cuh"

constexpr int kTensors = 110;  // as many as 4 KB of kernel parameters can name, beside the numbers
constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // vectors in flight per thread, of each array
template <typename T> constexpr int kChunk = kThreads * 4 * kVecWidth<T>;  // elements that one block owns: 16 KB

// The tensors of one launch, by value: nothing is copied to the GPU beforehand, and a CUDA graph keeps it.
struct Table {
  void* params[kTensors];
  void* grads[kTensors];
  void* buffers[kTensors];
  long long sizes[kTensors];
  int chunk_ends[kTensors];  // how many chunks this tensor and all before it have
};

template <typename A> struct Rule {
  A lr, momentum, undamped, weight_decay;  // undamped is 1 - dampening
  A sign, unscale;                         // -1 to maximize; 1 / grad_scale
  bool first, nesterov, scaled;
};

// The tensor that chunk `chunk` belongs to: the first whose chunk_end exceeds it.
__device__ __forceinline__ int owner(const Table& table, int tensors, int chunk) {
  int low = 0, high = tensors - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.chunk_ends[middle] > chunk) high = middle;
    else low = middle + 1;
  }
  return low;
}

template <bool MOMENTUM, typename T>
__device__ __forceinline__ void update(T& param, T grad, T& buffer, const Rule<acc_t<T>>& rule) {
  using A = acc_t<T>;
  const A p = to_acc(param);
  A g = rule.sign * to_acc(grad);
  if (rule.weight_decay != A(0)) g = fma(rule.weight_decay, p, g);  // not 0 * p, which an infinite p makes NaN
  if (MOMENTUM) {
    const A b = rule.first ? g : fma(rule.undamped, g, rule.momentum * to_acc(buffer));
    buffer = from_acc<T>(b);
    g = rule.nesterov ? fma(rule.momentum, b, g) : b;
  }
  param = from_acc<T>(fma(-rule.lr, g, p));
}

template <typename T> __device__ __forceinline__ T unscaled(T grad, const Rule<acc_t<T>>& rule) {
  return from_acc<T>(to_acc(grad) * rule.unscale);
}

// `count` elements by one block of kThreads, 16 bytes at a time where all three arrays begin at a multiple of 16.
template <bool MOMENTUM, typename T>
__device__ __forceinline__ void update_chunk(T* params, T* grads, T* buffers, int count, const Rule<acc_t<T>>& rule) {
  constexpr int W = kVecWidth<T>;
  const bool vectors_fit = is_aligned16(params) && is_aligned16(grads) && (!MOMENTUM || is_aligned16(buffers));
  const int vectors = vectors_fit ? count / W : 0;
#pragma unroll 1  // what is in flight is unrolled within
  for (int begin = threadIdx.x; begin < vectors; begin += kUnroll * kThreads) {
    Vec<T, W> param[kUnroll], grad[kUnroll], buffer[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = begin + u * kThreads;
      if (v >= vectors) break;
      param[u] = load_vec<T, W>(params + v * W);
      grad[u] = load_vec<T, W>(grads + v * W);
      if (MOMENTUM && !rule.first) buffer[u] = load_vec<T, W>(buffers + v * W);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int v = begin + u * kThreads;
      if (v >= vectors) break;
      if (rule.scaled) {
        for (int k = 0; k < W; ++k) grad[u].data[k] = unscaled(grad[u].data[k], rule);
        store_vec<T, W>(grads + v * W, grad[u]);
      }
#pragma unroll
      for (int k = 0; k < W; ++k) update<MOMENTUM>(param[u].data[k], grad[u].data[k], buffer[u].data[k], rule);
      store_vec<T, W>(params + v * W, param[u]);
      if (MOMENTUM) store_vec<T, W>(buffers + v * W, buffer[u]);
    }
  }
#pragma unroll 1
  for (int i = vectors * W + threadIdx.x; i < count; i += kThreads) {
    if (rule.scaled) grads[i] = unscaled(grads[i], rule);
    T buffer = MOMENTUM && !rule.first ? buffers[i] : from_acc<T>(0);
    update<MOMENTUM>(params[i], grads[i], buffer, rule);
    if (MOMENTUM) buffers[i] = buffer;
  }
}

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: kThreads. A block owns one
// chunk of one tensor. `anchor` is a parameter of the launch, by which the launcher knows device and stream; the kernel
// goes by the table. lr_tensor, grad_scale and found_inf are null or point to one number on the device: they are read
// here, so that neither a changed learning rate nor a skipped step needs the host. Without momentum, buffers are null.
template <typename T, bool MOMENTUM>
__global__ void __launch_bounds__(kThreads)
    sgd_step(T* anchor, const __grid_constant__ Table table, int tensors, acc_t<T> lr, const acc_t<T>* lr_tensor,
             acc_t<T> momentum, acc_t<T> undamped, acc_t<T> weight_decay, int first, int nesterov, int maximize,
             const float* grad_scale, const float* found_inf) {
  using A = acc_t<T>;
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Rule<A> rule{lr_tensor != nullptr ? *lr_tensor : lr,
                     momentum,
                     undamped,
                     weight_decay,
                     A(maximize ? -1 : 1),
                     grad_scale != nullptr ? A(1) / A(*grad_scale) : A(1),
                     first != 0,
                     nesterov != 0,
                     grad_scale != nullptr};
  const int tensor = owner(table, tensors, blockIdx.x);
  const int chunk = blockIdx.x - (tensor == 0 ? 0 : table.chunk_ends[tensor - 1]);
  const long long begin = chunk * (long long)kChunk<T>, left = table.sizes[tensor] - begin;
  T* buffers = static_cast<T*>(table.buffers[tensor]);
  update_chunk<MOMENTUM>(static_cast<T*>(table.params[tensor]) + begin, static_cast<T*>(table.grads[tensor]) + begin,
                         MOMENTUM ? buffers + begin : buffers, left < kChunk<T> ? int(left) : kChunk<T>, rule);
}
