// softmax:      y_i = exp(x_i - max x) / sum_j exp(x_j - max x)          over one dimension
//               grad_x_i = y_i (grad_y_i - sum_j grad_y_j y_j)
// log_softmax:  y_i = (x_i - max x) - log sum_j exp(x_j - max x)
//               grad_x_i = grad_y_i - exp(y_i) sum_j grad_y_j
//
// Softmax and LogSoftmax are the structs of these formulas; `log` says which a launch is of. In log_softmax the maximum is
// subtracted first: max + log(sum) as one number would lose the sum beside a large maximum.
//
// x is (outer, size, inner) around the dimension; a row is `size` elements. With WIDEN y and grad_y have the type that T is
// computed in. Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); 4 to 6 flops and one exp, in the backward
// of softmax none.
//
// Reached on an H200 (GB/s of those bytes, forward / backward of softmax; a copy: 4226): 65536x4096 bf16 4080 / 4317,
// 2048x131072 bf16 3658 / 4066, 32768x4096 fp16 4013 / 4244, fp32 3382 / 4309, 131072x1000 bf16 4026 / 4235, 32768x4095 bf16
// 4044 / 4239, 4096x50257 bf16 3390 / 3804, 1048576x64 bf16 3749 / 4113, 1000003x17 bf16 2845 / 3369. log_softmax comes to
// within 4% of these, and in fp32 to 4040 forward. What is lost: a multiprocessor has two or three persistent rows at a
// time, and one of the longest, so that not always is one loaded while another is computed; of 17 elements, the start of a
// launch, in 24 us.
#include "softmax/persistent.cuh"
#include "softmax/registers.cuh"
#include "softmax/tiny_rows.cuh"
#include "softmax/two_pass.cuh"

// Rows of up to 32 vectors. Grid, block: see softmax_rows().
template <typename T>
__global__ void __launch_bounds__(1024)
    softmax_fwd_sub_warp(const T* __restrict__ x, T* __restrict__ y, long long rows, int size, bool log) {
  softmax_rows<1>(x, y, rows, size, log);
}

// Grid, block, shared memory: see softmax_tiny_rows().
template <typename T>
__global__ void __launch_bounds__(kSmallRows, kTinyBlocks<T>)
    softmax_fwd_tiny_rows(const T* __restrict__ x, T* __restrict__ y, long long rows, int size, int rows_each,
                          bool log) {
  softmax_tiny_rows(x, y, rows, size, rows_each, log);
}

// Grid, block: see softmax_rows().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(1024)
    softmax_fwd_block(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long rows, int size, bool log) {
  softmax_rows<BLOCK_VECTORS>(x, y, rows, size, log);
}

// Grid, block, shared memory: see softmax_persistent().
template <typename T, int THREADS, int BLOCKS, int OWN>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_fwd_persistent(const T* __restrict__ x, T* __restrict__ y, long long rows, long long size, int vectors,
                           bool log) {
  softmax_persistent<THREADS, OWN>(x, y, rows, size, vectors, log);
}

// Grid, block: see softmax_two_pass().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(TWO_PASS_THREADS, TWO_PASS_BLOCKS)
    softmax_fwd_two_pass(const T* __restrict__ x, out_t<T, WIDEN>* __restrict__ y, long long outer, long long size,
                         long long inner, bool log) {
  softmax_two_pass(x, y, outer, size, inner, log);
}

// Rows of up to 32 vectors. Grid, block: see softmax_rows_bwd().
template <typename T>
__global__ void __launch_bounds__(1024)
    softmax_bwd_sub_warp(const T* __restrict__ grad_y, const T* __restrict__ y, T* __restrict__ grad_x, long long rows,
                         int size, bool log) {
  softmax_rows_bwd<1>(grad_y, y, grad_x, rows, size, log);
}

// Grid, block, shared memory: see softmax_tiny_rows_bwd().
template <typename T>
__global__ void __launch_bounds__(kSmallRows, kTinyBlocksBwd)
    softmax_bwd_tiny_rows(const T* __restrict__ grad_y, const T* __restrict__ y, T* __restrict__ grad_x, long long rows,
                          int size, int rows_each, bool log) {
  softmax_tiny_rows_bwd(grad_y, y, grad_x, rows, size, rows_each, log);
}

// Grid, block: see softmax_rows_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(1024)
    softmax_bwd_block(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                      T* __restrict__ grad_x, long long rows, int size, bool log) {
  softmax_rows_bwd<BLOCK_VECTORS>(grad_y, y, grad_x, rows, size, log);
}

// Grid, block, shared memory: see softmax_persistent_bwd().
template <typename T, int THREADS, int BLOCKS, int OWN>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_bwd_persistent(const T* __restrict__ grad_y, const T* __restrict__ y, T* __restrict__ grad_x,
                           long long rows, long long size, int vectors, bool log) {
  softmax_persistent_bwd<THREADS, OWN>(grad_y, y, grad_x, rows, size, vectors, log);
}

// Grid, block: see softmax_two_pass_bwd().
template <typename T, bool WIDEN>
__global__ void __launch_bounds__(TWO_PASS_THREADS, TWO_PASS_BLOCKS)
    softmax_bwd_two_pass(const out_t<T, WIDEN>* __restrict__ grad_y, const out_t<T, WIDEN>* __restrict__ y,
                         T* __restrict__ grad_x, long long outer, long long size, long long inner, bool log) {
  with_formulas(log, [&](auto f) { softmax_two_pass_bwd<decltype(f)>(grad_y, y, grad_x, outer, size, inner); });
}
