// Products of a warpgroup, 128 threads, with operands in shared memory (wgmma of sm_90a, and of no other architecture).
//
// An operand is stored in lines of 128 bytes under the 128-byte swizzle, as TMA copies a box of 64 elements by some rows. K-major:
// a line has 64 of k of one row. MN-major (TRANSPOSED): a line has 64 rows of one k; the next 64 rows lie 64 lines further.
#pragma once

#include "common/core/types.cuh"

namespace wgmma {

constexpr int kK = 16;  // of k, that one product takes

// What an instruction is told of an operand that begins at a shared address. That of a block of a cluster has the block's rank
// above bit 24: it is masked, since the hardware would take it for a part of the address.
template <bool TRANSPOSED> __device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  constexpr unsigned long long kBetweenBoxes = TRANSPOSED ? 64 * 128 : 16, kBetweenLines8 = 8 * 128, kSwizzle128 = 1;
  return (address & 0x3ffff) >> 4 | kBetweenBoxes >> 4 << 16 | kBetweenLines8 >> 4 << 32 | kSwizzle128 << 62;
}

// What is added to a descriptor for the next kK of k.
template <bool TRANSPOSED> constexpr unsigned kStep = (TRANSPOSED ? kK * 128 : kK * 2) >> 4;

// sums[64][N] = a[64][16] b[N][16]^T, added to what sums holds where `add` is not 0. Thread (w, g, t) = (thread / 32, lane / 4,
// lane % 4) has of rows 16 w + g and 16 w + g + 8 the columns 8 i + 2 t and 8 i + 2 t + 1, as sums[4 i + 0, 1] and [4 i + 2, 3].
template <typename T, int N, bool A_TRANSPOSED, bool B_TRANSPOSED> struct Product;

#define LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LIST_32 LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST_64                                                                                                        \
  LIST_32                                                                                                              \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%" \
  "60,%61,%62,%63"
#define LIST_48 LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LIST_40 LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LIST_96                                                                                                        \
  LIST_64                                                                                                              \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%" \
  "92,%93,%94,%95"
#define LIST_128                                                                                                      \
  LIST_96                                                                                                             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%" \
  "119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)

#define PRODUCT(T, PTX, N, LIST, A, B, ADD, A_T, B_T, ...)                                                         \
  template <bool A_TRANSPOSED, bool B_TRANSPOSED> struct Product<T, N, A_TRANSPOSED, B_TRANSPOSED> {               \
    static __device__ __forceinline__ void add(float (&sums)[N / 2], unsigned long long a, unsigned long long b,   \
                                               unsigned add) {                                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX \
                   "." PTX " {" LIST "}, " A ", " B ", p, 1, 1, " A_T ", " B_T ";}"                                \
                   : __VA_ARGS__                                                                                   \
                   : "l"(a), "l"(b), "r"(add), "n"(int(A_TRANSPOSED)), "n"(int(B_TRANSPOSED)));                    \
    }                                                                                                              \
  };
#define PRODUCTS(T, PTX)                                                                                       \
  PRODUCT(T, PTX, 32, LIST_16, "%16", "%17", "%18", "%19", "%20", SUMS_16(0))                                  \
  PRODUCT(T, PTX, 64, LIST_32, "%32", "%33", "%34", "%35", "%36", SUMS_32(0))                                  \
  PRODUCT(T, PTX, 80, LIST_40, "%40", "%41", "%42", "%43", "%44", SUMS_32(0), SUMS_4(32), SUMS_4(36))          \
  PRODUCT(T, PTX, 96, LIST_48, "%48", "%49", "%50", "%51", "%52", SUMS_32(0), SUMS_16(32))                     \
  PRODUCT(T, PTX, 128, LIST_64, "%64", "%65", "%66", "%67", "%68", SUMS_32(0), SUMS_32(32))                    \
  PRODUCT(T, PTX, 192, LIST_96, "%96", "%97", "%98", "%99", "%100", SUMS_32(0), SUMS_32(32), SUMS_32(64))      \
  PRODUCT(T, PTX, 256, LIST_128, "%128", "%129", "%130", "%131", "%132", SUMS_32(0), SUMS_32(32), SUMS_32(64), \
          SUMS_32(96))
PRODUCTS(__half, "f16")
PRODUCTS(__nv_bfloat16, "bf16")

// The same of 8-bit floating-point numbers, of which one product takes 2 kK of k: a[64][32] b[N][32]^T, both K-major, as bytes. In
// descriptors and stages they count as half as many elements of 16 bits. The sums have fewer bits than fp32 while they are in
// the tensor cores: see docs/simulator.md.
struct E4M3;
struct E5M2;
template <class A, class B, int N> struct ProductOfBytes;

#define PRODUCT_OF_BYTES(A_TYPE, B_TYPE, TYPES, N, LIST, A, B, ADD, ...)                                             \
  template <> struct ProductOfBytes<A_TYPE, B_TYPE, N> {                                                             \
    static __device__ __forceinline__ void add(float (&sums)[N / 2], unsigned long long a, unsigned long long b,     \
                                               unsigned add) {                                                       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES \
                   " {" LIST "}, " A ", " B ", p, 1, 1;}"                                                            \
                   : __VA_ARGS__                                                                                     \
                   : "l"(a), "l"(b), "r"(add));                                                                      \
    }                                                                                                                \
  };
#define PRODUCTS_OF_BYTES(A, B, TYPES)                                                                       \
  PRODUCT_OF_BYTES(A, B, TYPES, 32, LIST_16, "%16", "%17", "%18", SUMS_16(0))                                \
  PRODUCT_OF_BYTES(A, B, TYPES, 64, LIST_32, "%32", "%33", "%34", SUMS_32(0))                                \
  PRODUCT_OF_BYTES(A, B, TYPES, 128, LIST_64, "%64", "%65", "%66", SUMS_32(0), SUMS_32(32))                  \
  PRODUCT_OF_BYTES(A, B, TYPES, 192, LIST_96, "%96", "%97", "%98", SUMS_32(0), SUMS_32(32), SUMS_32(64))     \
  PRODUCT_OF_BYTES(A, B, TYPES, 256, LIST_128, "%128", "%129", "%130", SUMS_32(0), SUMS_32(32), SUMS_32(64), \
                   SUMS_32(96))
PRODUCTS_OF_BYTES(E4M3, E4M3, "e4m3.e4m3")
PRODUCTS_OF_BYTES(E4M3, E5M2, "e4m3.e5m2")
PRODUCTS_OF_BYTES(E5M2, E4M3, "e5m2.e4m3")

// The same with a[64][16] in registers, two elements in each: rows g and g + 8, then 8 columns further, as sums are held. b is
// MN-major.
template <typename T, int N> struct ProductOfRegisters;

#define PRODUCT_OF_REGISTERS(T, PTX, N, LIST, A0, A1, A2, A3, B, ADD, ...)                                         \
  template <> struct ProductOfRegisters<T, N> {                                                                    \
    static __device__ __forceinline__ void add(float (&sums)[N / 2], const unsigned* a, unsigned long long b) {    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX \
                   "." PTX " {" LIST "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 1;}"                    \
                   : __VA_ARGS__                                                                                   \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                  \
    }                                                                                                              \
  };
#define PRODUCTS_OF_REGISTERS(T, PTX)                                                                                  \
  PRODUCT_OF_REGISTERS(T, PTX, 64, LIST_32, "%32", "%33", "%34", "%35", "%36", "%37", SUMS_32(0))                      \
  PRODUCT_OF_REGISTERS(T, PTX, 96, LIST_48, "%48", "%49", "%50", "%51", "%52", "%53", SUMS_32(0), SUMS_16(32))         \
  PRODUCT_OF_REGISTERS(T, PTX, 128, LIST_64, "%64", "%65", "%66", "%67", "%68", "%69", SUMS_32(0), SUMS_32(32))        \
  PRODUCT_OF_REGISTERS(T, PTX, 192, LIST_96, "%96", "%97", "%98", "%99", "%100", "%101", SUMS_32(0), SUMS_32(32),      \
                       SUMS_32(64))                                                                                    \
  PRODUCT_OF_REGISTERS(T, PTX, 256, LIST_128, "%128", "%129", "%130", "%131", "%132", "%133", SUMS_32(0), SUMS_32(32), \
                       SUMS_32(64), SUMS_32(96))
PRODUCTS_OF_REGISTERS(__half, "f16")
PRODUCTS_OF_REGISTERS(__nv_bfloat16, "bf16")
#undef LIST_16
#undef LIST_32
#undef LIST_40
#undef LIST_48
#undef LIST_64
#undef LIST_96
#undef LIST_128
#undef SUMS_4
#undef SUMS_16
#undef SUMS_32
#undef PRODUCT
#undef PRODUCTS
#undef PRODUCT_OF_BYTES
#undef PRODUCTS_OF_BYTES
#undef PRODUCT_OF_REGISTERS
#undef PRODUCTS_OF_REGISTERS

// Before the first product that reads these registers, and wherever they were written since.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups of products but the newest PENDING are complete.
template <int PENDING> __device__ __forceinline__ void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from reading a sum before the wait above.
__device__ __forceinline__ void keep_behind(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// How many registers a thread of this warpgroup has from here on.
template <int REGISTERS> __device__ __forceinline__ void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace wgmma
