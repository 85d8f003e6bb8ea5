// Random numbers that are a function of a seed and a counter: Philox4x32-7, from "Parallel Random Numbers: As Easy as 1, 2, 3",
// Salmon and others, 2011. The authors find that seven rounds are the fewest that pass BigCrush. Ten, their default, leave a
// margin, but take longer than an element of bf16 takes to move.
#pragma once

constexpr int kPhiloxRounds = PHILOX_ROUNDS;  // defined by _util/philox.py, which has the same in PyTorch

struct Philox { unsigned word[4]; };

// Returns four numbers of 32 random bits; `high` is the upper half of the counter. The compiler computes the rounds' keys once for all calls with the same seed.
__device__ __forceinline__ Philox philox(unsigned long long seed, unsigned long long counter,
                                         unsigned long long high = 0) {
  unsigned key0 = unsigned(seed), key1 = unsigned(seed >> 32);
  unsigned a = unsigned(counter), b = unsigned(counter >> 32), c = unsigned(high), d = unsigned(high >> 32);
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const unsigned long long left = 0xd2511f53ull * a, right = 0xcd9e8d57ull * c;
    a = unsigned(right >> 32) ^ b ^ key0, b = unsigned(right);
    c = unsigned(left >> 32) ^ d ^ key1, d = unsigned(left);
    key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}
