// Host functions in which C++ means something else than Python's text would: `record.py` runs them with a C++ compiler.
#include <algorithm>
#include <cmath>
#include <cstdint>

#define TWO_AND_THREE 2 + 3
#define NEGATIVE -4
#define TWICE(a) a * 2
#define HALF_OF(a, b) (a + b) / 2
#define MASK 0xF0
#define LARGEST (1 << 10)
enum Kind { FIRST, SECOND = 5, THIRD, LAST = THIRD * 2 };
const int kThreads = 64;
constexpr float kScale = 0.1f;
const unsigned kWide = 4000000000u;

int quotient(int a, int b) { return a / b; }
int remainder_of(int a, int b) { return a % b; }
int rounded_up(int a, int b) { return (a + b - 1) / b; }
int quotient_of_sum(int a, int b) { return a - b / 3 * 3 - (a - b) / -4; }
long long long_quotient(long long a, int b) { return a / b + a % b; }
unsigned unsigned_quotient(unsigned a, int b) { return a / b; }
unsigned wrapped_sum(unsigned a, unsigned b) { return a + b; }
unsigned wrapped_difference(unsigned a, unsigned b) { return a - b; }
unsigned wrapped_product(unsigned a, unsigned b) { return a * b; }
size_t wide_difference(size_t a, size_t b) { return a - b; }
uint64_t hashed(uint64_t a, uint32_t b) {
  uint64_t h = 1469598103934665603ull;
  h = (h ^ a) * 1099511628211ull;
  h ^= b << 7;
  return h * 31u >> 5;
}
unsigned wrapped_compound(unsigned a, unsigned b) {
  a -= b;
  a *= 3;
  a <<= 5;
  --a;
  a ^= b;
  return a;
}
int wrapped_bytes(int a) {
  uint8_t low = a;
  low += 250;
  low--;
  return low;
}
unsigned negated(unsigned a) { return -a + ~a; }
int compared_across(int a, unsigned b) { return a < b ? 1 : a == b ? 2 : 3; }
int compared_wide(int a, size_t b) { return a >= b; }
long long unsigned_to_wide(unsigned a, int b) { return a + b; }
int truncated(int a) {
  int c = a * 0.5;
  return c;
}
int truncated_compound(int a) {
  a *= 0.75;
  a += 1.9;
  a -= 0.1f;
  return a;
}
int divided_compound(int a, int b) {
  a /= b;
  a %= 5;
  return a;
}
int narrowed(int a) {
  char c = a;
  unsigned char u = a;
  short s = a * 3;
  return c * 1000000 + u * 1000 + s;
}
int from_long(long long a) {
  int low = a;
  return low;
}
int of_bool(int a, int b) {
  bool some = a + b;
  int both = a && b, either = a || b;
  return some + 2 * both + 4 * either + 8 * (a && !b) + 16 * !a;
}
int bool_of_fraction(float a) {
  bool some = a;
  return some;
}
float product(float a, float b) { return a * b; }
float third(float a) { return a / 3; }
float sums(float a, float b) {
  float s = 0;
  for (int i = 0; i < 7; ++i) s += a * b + 0.1f;
  return s;
}
double mixed(float a, double b) { return a * b + a * 0.1f + kScale; }
float of_large_int(int a) { return a * 1.0f; }
float literal_of_double(float a) { return a + 0.1; }
int rounded(float a) { return (int)(a + 0.5f) + int(a * 10) + static_cast<int>(a / 0.3f); }
double over_zero(double a, int b) { return a / b; }
float roots(float a) { return std::sqrt(a) + sqrtf(a) + std::floor(a) + std::ceil(a); }
double halves(double a, float b) { return std::round(a) * 100 + roundf(b) + std::trunc(a) + round(a * 0.5); }
int ceiling(int a) { return ceil(a / 64.0); }
int ceiling_of_float(int a) { return std::ceil(static_cast<float>(a) / 3.0f); }
int not_first(int a, int b) { return !a == b; }
int bits_last(int a, int b, int c) { return a & b == c; }
int bits_mixed(int a, int b) { return a | b ^ a & ~b; }
int shifted(int a, int b) { return a + b << 2 >> 1; }
int signed_shift(int a) { return a >> 3; }
int chained(int a, int b, int c) { return a < b < c; }
int equal_chain(int a, int b, int c) { return a == b == c; }
int nested_choice(int a, int b) { return a > 0 ? b > 0 ? 1 : 2 : b > 0 ? 3 : 4; }
int choice_of_types(int a) { return (a > 2 ? a : 0.5) * 3; }
int unary_mix(int a, int b) { return -a - -b - (a - (b - a)); }
int macro_text(int a) { return a * TWO_AND_THREE; }
int macro_negative(int a) { return a - NEGATIVE + NEGATIVE * a; }
int macro_arguments(int a, int b) { return TWICE(a + b) + HALF_OF(a, b) * 3; }
int macro_constants(int a) { return (a & MASK) + LARGEST / kThreads + kThreads * a; }
int enumerated(int a) { return a * SECOND + THIRD - LAST + FIRST; }
unsigned constant_wide(int a) { return kWide + a * 3; }
int octal_and_hex(int a) { return a + 010 + 0x1F + 0b101 + 1'000; }
int inner_scope(int a) {
  int c = 1;
  if (a > 0) {
    int c = a * 2;
    c += 1;
  }
  for (int c = 0; c < 3; ++c) a += c;
  return c + a;
}
int twice_scoped(int a) {
  int found = 0;
  { int b = a; found += b; }
  { float b = a * 0.5f; found += b; }
  return found;
}
int limit_changes(int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    if (i % 3 == 0) n--;
    count += i;
  }
  return count * 100 + n;
}
int counter_changes(int n) {
  int count = 0;
  for (int i = 0; i < n; i++) {
    if (i == 2) i += 3;
    count += i;
  }
  return count;
}
int two_conditions(int n, int most) {
  bool ok = true;
  int sum = 0;
  for (int i = 0; i < n && ok; ++i) {
    sum += i;
    ok = sum < most;
  }
  return sum;
}
int counted_inside(int n, int by) {
  int s = 0, k = n;
  while (k-- > 0) s += k * by++;
  if (n > 5 && by++ > 0) s += 1000;
  return s + (k += by) * 3 - k;
}
int called_at_once(int n, int by) {
  int s = [&] {
    if (n > by) return n;
    return by * 2;
  }();
  auto more = [&](int k) { s += k--; return s * k; };
  for (int i = 0; i < s && i < 5; ++i) more(i);
  return s * 10 + more(by);
}
int counter_outside(int n) {
  int i;
  for (i = 0; i < n; ++i) {
    if (i == 9) break;
  }
  return i;
}
int steps(int n) {
  int s = 0;
  for (int i = 1; i <= n; i += 3) s += i;
  for (int i = n; i > 0; i -= 2) s += i * 2;
  for (int i = n - 1; i >= 0; --i) s -= i;
  for (int i = 1; i < n; i *= 2) s += 1000;
  for (int i = n; i > 0; i >>= 1) s += 7;
  return s;
}
int unsigned_countdown(unsigned n) {
  int s = 0;
  for (unsigned i = n; i > 0; --i) s += 1 + i;
  return s;
}
int two_counters(int n) {
  int s = 0;
  for (int i = 0, j = n; i < j; ++i, --j) s += j - i;
  return s;
}
int leaves_early(int n) {
  int s = 0;
  for (int i = 0; i < n; ++i) {
    if (i % 2) continue;
    if (i > 6) break;
    s += i;
  }
  for (int i = 0; i < n; i += 1 + i) {
    if (i % 3 == 1) continue;
    s += 10;
  }
  return s;
}
int whiles(int n) {
  int s = 0;
  while (n > 0) {
    n /= 2;
    if (n == 3) continue;
    s += n;
  }
  do {
    s += 3;
    if (s % 2) continue;
    s += 1;
  } while (s < 20);
  do { s *= 2; } while (0);
  return s;
}
int switched(int n) {
  switch (n) {
    default:
      return -1;
    case 1:
      return 10;
    case 2:
    case 3:
      n += 20;
      break;
    case 4:
      n += 100;
    case 5: {
      n += 1000;
      break;
    }
    case SECOND + 1:
      n = 7;
  }
  return n;
}
int switched_inside(int n) {
  int s = 0;
  for (int i = 0; i < n; ++i) {
    switch (i % 3) {
      case 0:
        continue;
      case 1:
        s += 1;
        break;
      default:
        s += 10;
    }
    s += 100;
  }
  return s;
}
void bump(int& n, float& f, int by) {
  n += by;
  f *= 0.1f;
}
int counted(int n, int& seen) {
  seen = seen + 1;
  return n * seen;
}
int by_reference(int a) {
  int n = a;
  float f = a;
  bump(n, f, 3);
  bump(n, f, n);
  int seen = 0;
  int twice = counted(n, seen);
  twice = counted(twice, seen);
  return twice + seen * 1000 + static_cast<int>(f * 1000);
}
int alias_of(int a) {
  int n = a;
  int& other = n;
  other += 5;
  const int& kept = n;
  n *= 2;
  return kept - other + n;
}
template <typename T>
T ceil_of(T a, T b) {
  return (a + b - 1) / b;
}
template <typename T>
inline T half_of(T a) {
  return a / 2;
}
int instances(int a, float b, unsigned c) {
  return ceil_of(a, 4) * 100 + static_cast<int>(half_of(b) * 8) + half_of(a) + (half_of(c - 5) > 1000) + half_of<int>(a * 3);
}
int overloaded(int a) { return a + 1; }
int overloaded(float a) { return static_cast<int>(a * 4); }
int overloaded(int a, int b) { return a * b; }
int overloads(int a, float b) { return overloaded(a) * 10000 + overloaded(b) * 100 + overloaded(a, 3); }
int extremes(int a, int b) { return std::max(a, b) * 3 - std::min({a, b, 2}) + std::abs(a - b) + abs(b); }
unsigned extremes_unsigned(unsigned a) { return std::min(a - 1, 10u); }
int arrays(int a) {
  int sizes[3] = {1, a, 3};
  sizes[0] += a / 2;
  int total = 0;
  for (int i = 0; i < 3; ++i) total = total * 10 + sizes[i];
  return total;
}
int with_default(int a, int by = 512) { return a * by; }
int defaults(int a) { return with_default(a) + with_default(a, 2); }
int converted_argument(double a) { return with_default(a, 2.9); }
int lucky(int n) {
  if (n % 2 == 0) return 64;
  else if (n > 5) return -n;
  return 0;
}

#ifdef __CUDACC__
__global__ void nothing(float* x) {}
void all(float* x) {
  nothing<<<1, 1>>>(x);
  // CALLS
}
#endif
