// y_i = (x_i - max x) - log sum_j exp(x_j - max x)      over one dimension
// grad_x_i = grad_y_i - exp(y_i) sum_j grad_y_j
//
// The maximum is taken off first: max + log(sum) as one number would lose the sum beside a large maximum.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); about 5 flops and one exp, each way.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 65536x4096 bf16 4092 / 4320, 2048x131072
// bf16 3682 / 4055, 32768x4096 fp16 4008 / 4241, fp32 4040 / 4316, 131072x1000 bf16 4041 / 4234, 32768x4095 bf16 4083 /
// 4243, 4096x50257 bf16 3450 / 3811, 1048576x64 bf16 3611 / 4129, 1000003x17 bf16 2802 / 3378. Lost: as in softmax.cu, of
// long rows that a multiprocessor holds too few at a time.
#include "softmax/softmax.cuh"
#include "softmax/tiny_rows.cuh"

// Grid, block, ownership: see softmax_rows(). WIDEN: y in the type that T is computed in.
template <typename T, bool WIDEN, int K>
__global__ void __launch_bounds__(1024)
    log_softmax_fwd(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, int size) {
  softmax_rows<LogSoftmax, K>(x, y, rows, size);
}

// Grid, block, shared memory: see softmax_small().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kSmallRows, kSmallBlocks<T, WIDEN>)
    log_softmax_fwd_small(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, int size,
                          int rows_each) {
  softmax_small<LogSoftmax>(x, y, rows, size, rows_each);
}

// Grid, block, ownership: see softmax_held().
template <typename T, bool WIDEN, int THREADS>
__global__ void __launch_bounds__(THREADS, kHeldBlocks<THREADS>)
    log_softmax_fwd_held(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, long long size,
                         int vectors) {
  softmax_held<LogSoftmax, THREADS>(x, y, rows, size, vectors);
}

// Grid, block, ownership: see softmax_wide().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kWideThreads)
    log_softmax_fwd_wide(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, long long size) {
  softmax_wide<LogSoftmax, 4>(x, y, rows, size);
}

// Grid, block, ownership: see softmax_columns(). ALIGNED: a thread owns as many columns as make 16 bytes of x.
template <typename T, bool WIDEN, bool ALIGNED>
__global__ void __launch_bounds__(kColumnThreads)
    log_softmax_fwd_columns(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long outer, long long size,
                            long long inner) {
  softmax_columns<LogSoftmax, ALIGNED ? kVecWidth<T> : 1>(x, y, outer, size, inner);
}

// Grid, block, ownership: see softmax_rows_bwd().
template <typename T, bool WIDEN, int K>
__global__ void __launch_bounds__(1024)
    log_softmax_bwd(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                    T* __restrict__ grad_x, long long rows, int size) {
  softmax_rows_bwd<LogSoftmax, K>(grad_y, y, grad_x, rows, size);
}

// Grid, block, shared memory: see softmax_small_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kSmallRows, kSmallBlocksBwd<out_t<T, WIDEN>>)
    log_softmax_bwd_small(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                          T* __restrict__ grad_x, long long rows, int size, int rows_each) {
  softmax_small_bwd<LogSoftmax>(grad_y, y, grad_x, rows, size, rows_each);
}

// Grid, block, ownership: see softmax_held_bwd().
template <typename T, bool WIDEN, int THREADS>
__global__ void __launch_bounds__(THREADS, kHeldBlocks<THREADS>)
    log_softmax_bwd_held(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                         T* __restrict__ grad_x, long long rows, long long size, int vectors) {
  softmax_held_bwd<LogSoftmax, THREADS>(grad_y, y, grad_x, rows, size, vectors);
}

// Grid, block, ownership: see softmax_wide_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(kWideThreads)
    log_softmax_bwd_wide(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                         T* __restrict__ grad_x, long long rows, long long size) {
  softmax_wide_bwd<LogSoftmax, 2>(grad_y, y, grad_x, rows, size);
}

// Grid, block, ownership: see softmax_columns_bwd().
template <typename T, bool WIDEN, bool ALIGNED>
__global__ void __launch_bounds__(kColumnThreads)
    log_softmax_bwd_columns(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                            T* __restrict__ grad_x, long long outer, long long size, long long inner) {
  softmax_columns_bwd<LogSoftmax, ALIGNED ? kVecWidth<T> : 1>(grad_y, y, grad_x, outer, size, inner);
}
