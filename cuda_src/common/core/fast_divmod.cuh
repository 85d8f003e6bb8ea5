// Division by a number that is fixed for a launch: the host computes a multiplier and a shift.
#pragma once

// Divides 0 <= n < 2^31 by `divisor`, with a multiplication and a shift (Granlund and Montgomery, 1994).
struct Divisor {
  long long divisor, magic, shift;

  __device__ __forceinline__ int divide(int n) const {
    return (__umulhi(n, static_cast<unsigned>(magic)) + static_cast<unsigned>(n)) >> static_cast<int>(shift);
  }
};
