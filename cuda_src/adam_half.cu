// Adam as in adam.cu, for parameters of half types, of which small updates would be lost to rounding.
//
// adam_master      master, exp_avg and exp_avg_sq are fp32, and param = round(master). Where param is not that any more, somebody
//                  has changed it since, and master begins with param again.
//                  Bytes per element: 30, of which 2 for grad, 4 for param and 24 for the state; 38 with amsgrad.
// adam_stochastic  all is bf16, and what is stored is rounded up with the probability of the part that is cut off: on the
//                  average nothing is lost. Bytes per element: 14; 18 with amsgrad.
//
// The bits that element i of a tensor is rounded by are words 2 (i % 2) and 2 (i % 2) + 1 of Philox4x32-7 with i / 2 for its
// counter: 16 each for param, exp_avg, exp_avg_sq and the largest exp_avg_sq, the lower half of a word first. Its key is
// words 0 and 1 of Philox4x32-7 with the seed for its key and step * 2^32 + tensor for its counter. cupyops/optim/half.py has
// the same in PyTorch, and defines PHILOX_ROUNDS.
#include "common/core/philox.cuh"
#include "optim/adam.cuh"

// A tensor's arrays as adam_master has them.
template <typename T> struct MasterArrays {
  static constexpr int kWidth = 4;  // elements of a vector: 16 bytes of fp32
  template <int W> struct Values {
    Vec<T, W> param, grad;
    Vec<float, W> state[4];
  };
  T *param, *grad;
  float* state[4];  // master, exp_avg, exp_avg_sq, and the largest of the latter, or null

  __device__ __forceinline__ MasterArrays(const Table<7>& table, Chunk chunk)
      : param(static_cast<T*>(table.arrays[0][chunk.tensor]) + chunk.begin),
        grad(static_cast<T*>(table.arrays[1][chunk.tensor]) + chunk.begin) {
    const int places[4] = {4, 2, 3, 5};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* array = static_cast<float*>(table.arrays[places[j]][chunk.tensor]);
      state[j] = array == nullptr ? nullptr : array + chunk.begin;
    }
  }

  __device__ __forceinline__ bool aligned() const {
    bool all = is_aligned16(param) && is_aligned16(grad);
#pragma unroll
    for (int j = 0; j < 4; ++j) all = all && is_aligned16(state[j]);
    return all;
  }

  template <int W> __device__ __forceinline__ void load(int v, Values<W>& values) const {
    values.param = load_vec<T, W>(param + v * W);
    values.grad = load_vec<T, W>(grad + v * W);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values.state[j] = state[j] != nullptr ? load_vec<float, W>(state[j] + v * W) : Vec<float, W>{};
    }
  }

  template <int W>
  __device__ __forceinline__ void change(int v, Values<W>& values, const Adam<T, true>& rule) const {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const float given = to_acc(values.param.data[k]), kept = values.state[0].data[k];
      const bool same = to_acc(from_acc<T>(kept)) == given;
      float x[5] = {same ? kept : given, to_acc(values.grad.data[k]), values.state[1].data[k], values.state[2].data[k],
                    values.state[3].data[k]};
      rule(x);
      values.param.data[k] = from_acc<T>(x[0]);
      values.grad.data[k] = from_acc<T>(x[1]);
      values.state[0].data[k] = x[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) values.state[j].data[k] = x[j + 1];
    }
    store_vec<T, W>(param + v * W, values.param);
    if (rule.gradient.scaled) store_vec<T, W>(grad + v * W, values.grad);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (state[j] != nullptr) store_vec<float, W>(state[j] + v * W, values.state[j]);
    }
  }
};

// Rounded up in magnitude where the part that is cut off and 16 random bits add up to one unit. What is not finite stays.
__device__ __forceinline__ __nv_bfloat16 round_by(float x, unsigned bits) {
  const unsigned word = __float_as_uint(x);
  if ((word & 0x7f800000u) == 0x7f800000u) return from_acc<__nv_bfloat16>(x);
  return __ushort_as_bfloat16((unsigned short)((word + bits) >> 16));
}

// A tensor's arrays as adam_stochastic has them, in bf16 all.
template <typename T> struct StochasticArrays {
  static constexpr int kWidth = kVecWidth<T>;
  template <int W> struct Values { Vec<T, W> of[5]; };
  T* arrays[5];  // param, grad, exp_avg, exp_avg_sq, and the largest of the latter, or null
  unsigned long long key;
  long long begin;

  __device__ __forceinline__ StochasticArrays(const Table<6>& table, Chunk chunk, unsigned long long key)
      : key(key), begin(chunk.begin) {
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      T* array = static_cast<T*>(table.arrays[j][chunk.tensor]);
      arrays[j] = array == nullptr ? nullptr : array + chunk.begin;
    }
  }

  __device__ __forceinline__ bool aligned() const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < 5; ++j) all = all && is_aligned16(arrays[j]);
    return all;
  }

  template <int W> __device__ __forceinline__ void load(int v, Values<W>& values) const {
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      values.of[j] = arrays[j] != nullptr ? load_vec<T, W>(arrays[j] + v * W) : Vec<T, W>{};
    }
  }

  template <int W>
  __device__ __forceinline__ void change(int v, Values<W>& values, const Adam<T, true>& rule) const {
    Philox four;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const long long place = begin + (long long)v * W + k;
      if (W == 1 || k % 2 == 0) four = philox(key, place / 2);
      const bool second = W == 1 ? place % 2 != 0 : k % 2 != 0;  // a vector begins at an even place
      const unsigned low = second ? four.word[2] : four.word[0], high = second ? four.word[3] : four.word[1];
      float x[5];
#pragma unroll
      for (int j = 0; j < 5; ++j) x[j] = to_acc(values.of[j].data[k]);
      rule(x);
      values.of[0].data[k] = round_by(x[0], low & 0xffff);
      values.of[1].data[k] = from_acc<T>(x[1]);
      values.of[2].data[k] = round_by(x[2], low >> 16);
      values.of[3].data[k] = round_by(x[3], high & 0xffff);
      values.of[4].data[k] = round_by(x[4], high >> 16);
    }
#pragma unroll
    for (int j = 0; j < 5; ++j) {
      if (arrays[j] != nullptr && rule.stores(j)) store_vec<T, W>(arrays[j] + v * W, values.of[j]);
    }
  }
};

// Changes units of W elements, from the begin-th up to the end-th, by a block of OPTIM_THREADS.
template <int W, int UNROLL, typename Arrays, typename Rule>
__device__ __forceinline__ void sweep_arrays(const Arrays& arrays, int begin, int end, const Rule& rule) {
#pragma unroll 1  // what is in flight is unrolled within
  for (int first = begin + threadIdx.x; first < end; first += UNROLL * OPTIM_THREADS) {
    typename Arrays::template Values<W> values[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (first + u * OPTIM_THREADS < end) arrays.template load<W>(first + u * OPTIM_THREADS, values[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (first + u * OPTIM_THREADS < end) arrays.template change<W>(first + u * OPTIM_THREADS, values[u], rule);
    }
  }
}

// A chunk: vectors where all of the arrays begin at a multiple of 16, and the rest by elements.
template <typename Arrays, typename Rule>
__device__ __forceinline__ void update_arrays(const Arrays& arrays, int count, const Rule& rule) {
  constexpr int W = Arrays::kWidth;
  const int vectors = arrays.aligned() ? count / W : 0;
  sweep_arrays<W, kUnroll>(arrays, 0, vectors, rule);
  sweep_arrays<1, kUnroll>(arrays, vectors * W, count, rule);
}

// Grid: one block per chunk of each tensor, that is table.chunk_ends[tensors - 1]. Block: OPTIM_THREADS. A block owns one
// chunk of one tensor. `anchor` is one of the tensors, by which the launcher knows device and stream; the kernel goes by the
// table: param, grad, exp_avg, exp_avg_sq, master, the largest exp_avg_sq or null, and the step of each tensor as in adam.cu.
// lr_tensor, grad_scale, found_inf and clip are null or point to one number on the device.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS)
    adam_master(T* anchor, const __grid_constant__ Table<7> table, int tensors, float step, float lr,
                const float* lr_tensor, float rest1, float log_beta1, float beta2, float rest2, float log_beta2,
                float eps, float weight_decay, bool decoupled, bool maximize, const float* grad_scale,
                const float* found_inf, const float* clip) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Chunk chunk = own_chunk<T>(table, tensors);
  const float* counted = static_cast<const float*>(table.arrays[6][chunk.tensor]);
  const Adam<T, true> rule =  // with the largest as 0, where there is none, it is the one of now
      adam_rule<T, true>(Gradient<T>(grad_scale, maximize, clip), counted != nullptr ? *counted : step,
                         lr_tensor != nullptr ? *lr_tensor : lr, rest1, log_beta1, beta2, rest2, log_beta2, eps,
                         weight_decay, decoupled);
  update_arrays(MasterArrays<T>(table, chunk), chunk.count, rule);
}

// The same grid, block and numbers. The table: param, grad, exp_avg, exp_avg_sq, the largest or null, and the steps. `start` is
// the number of the table's first tensor.
template <typename T>
__global__ void __launch_bounds__(OPTIM_THREADS)
    adam_stochastic(T* anchor, const __grid_constant__ Table<6> table, int tensors, float step, float lr,
                    const float* lr_tensor, float rest1, float log_beta1, float beta2, float rest2, float log_beta2,
                    float eps, float weight_decay, bool decoupled, bool maximize, const float* grad_scale,
                    const float* found_inf, const float* clip, long long seed, int start) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const Chunk chunk = own_chunk<T>(table, tensors);
  const float* counted = static_cast<const float*>(table.arrays[5][chunk.tensor]);
  const float t = counted != nullptr ? *counted : step;
  const Adam<T, true> rule =
      adam_rule<T, true>(Gradient<T>(grad_scale, maximize, clip), t, lr_tensor != nullptr ? *lr_tensor : lr, rest1,
                         log_beta1, beta2, rest2, log_beta2, eps, weight_decay, decoupled);
  const Philox own = philox(seed, ((unsigned long long)t << 32) + (unsigned)(start + chunk.tensor));
  const unsigned long long key = ((unsigned long long)own.word[1] << 32) + own.word[0];
  update_arrays(StochasticArrays<T>(table, chunk, key), chunk.count, rule);
}
