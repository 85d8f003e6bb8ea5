// Division by a number that a launch fixes.
#pragma once

// n / divisor for 0 <= n < 2^31, by a multiplication and a shift.
struct Divisor {
  long long divisor, magic, shift;

  __device__ __forceinline__ int divide(int n) const {
    return (__umulhi(n, static_cast<unsigned>(magic)) + static_cast<unsigned>(n)) >> static_cast<int>(shift);
  }
};
