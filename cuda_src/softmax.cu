// y_i = exp(x_i - max x) / sum_j exp(x_j - max x)      over one dimension
// grad_x_i = y_i (grad_y_i - sum_j grad_y_j y_j)
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); about 6 flops forward, 4 backward, and one exp.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 65536x4096 bf16 4080 / 4317, 2048x131072
// bf16 3658 / 4066, 32768x4096 fp16 4013 / 4244, fp32 3382 / 4309, 131072x1000 bf16 4026 / 4235, 32768x4095 bf16 4044 /
// 4239, 4096x50257 bf16 3390 / 3804, 1048576x64 bf16 3749 / 4113, 1000003x17 bf16 2845 / 3369. Lost: of held rows two or
// three are on a multiprocessor at a time, and of very long ones one, so that the loads of one do not always go on while
// another is computed; of 17 elements, the start of a launch, in 24 us.
#include "softmax/softmax.cuh"
#include "softmax/tiny_rows.cuh"

// Grid, block, ownership: see softmax_rows(). WIDEN: y in the type that T is computed in.
template <typename T, bool WIDEN, int K>
__global__ void __launch_bounds__(1024)
    softmax_fwd(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, int size) {
  softmax_rows<Softmax, K>(x, y, rows, size);
}

// Grid, block, shared memory: see softmax_small().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kSmallRows, kSmallBlocks<T, WIDEN>)
    softmax_fwd_small(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, int size,
                      int rows_each) {
  softmax_small<Softmax>(x, y, rows, size, rows_each);
}

// Grid, block, ownership: see softmax_held().
template <typename T, bool WIDEN, int THREADS>
__global__ void __launch_bounds__(THREADS, kHeldBlocks<THREADS>)
    softmax_fwd_held(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, long long size,
                     int vectors) {
  softmax_held<Softmax, THREADS>(x, y, rows, size, vectors);
}

// Grid, block, ownership: see softmax_wide().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kWideThreads)
    softmax_fwd_wide(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, long long size) {
  softmax_wide<Softmax, 4>(x, y, rows, size);
}

// Grid, block, ownership: see softmax_columns(). ALIGNED: a thread owns as many columns as make 16 bytes of x.
template <typename T, bool WIDEN, bool ALIGNED>
__global__ void __launch_bounds__(kColumnThreads)
    softmax_fwd_columns(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long outer, long long size,
                        long long inner) {
  softmax_columns<Softmax, ALIGNED ? kVecWidth<T> : 1>(x, y, outer, size, inner);
}

// Grid, block, ownership: see softmax_rows_bwd().
template <typename T, bool WIDEN, int K>
__global__ void __launch_bounds__(1024)
    softmax_bwd(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                T* __restrict__ grad_x, long long rows, int size) {
  softmax_rows_bwd<Softmax, K>(grad_y, y, grad_x, rows, size);
}

// Grid, block, shared memory: see softmax_small_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kSmallRows, kSmallBlocksBwd<out_t<T, WIDEN>>)
    softmax_bwd_small(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                      T* __restrict__ grad_x, long long rows, int size, int rows_each) {
  softmax_small_bwd<Softmax>(grad_y, y, grad_x, rows, size, rows_each);
}

// Grid, block, ownership: see softmax_held_bwd().
template <typename T, bool WIDEN, int THREADS>
__global__ void __launch_bounds__(THREADS, kHeldBlocks<THREADS>)
    softmax_bwd_held(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                     T* __restrict__ grad_x, long long rows, long long size, int vectors) {
  softmax_held_bwd<Softmax, THREADS>(grad_y, y, grad_x, rows, size, vectors);
}

// Grid, block, ownership: see softmax_wide_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kWideThreads)
    softmax_bwd_wide(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                     T* __restrict__ grad_x, long long rows, long long size) {
  softmax_wide_bwd<Softmax, 2>(grad_y, y, grad_x, rows, size);
}

// Grid, block, ownership: see softmax_columns_bwd().
template <typename T, bool WIDEN, bool ALIGNED>
__global__ void __launch_bounds__(kColumnThreads)
    softmax_bwd_columns(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                        T* __restrict__ grad_x, long long outer, long long size, long long inner) {
  softmax_columns_bwd<Softmax, ALIGNED ? kVecWidth<T> : 1>(grad_y, y, grad_x, outer, size, inner);
}
