// Host functions in which C++ means something else than Python's text would: `record.py` runs them with a C++ compiler.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

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
unsigned wrapped_compound(unsigned a, unsigned b) { a -= b; a *= 3; a <<= 5; --a; a ^= b; return a; }
int wrapped_bytes(int a) { uint8_t low = a; low += 250; low--; return low; }
unsigned negated(unsigned a) { return -a + ~a; }
int compared_across(int a, unsigned b) { return a < b ? 1 : a == b ? 2 : 3; }
int compared_wide(int a, size_t b) { return a >= b; }
long long unsigned_to_wide(unsigned a, int b) { return a + b; }
int truncated(int a) { int c = a * 0.5; return c; }
int truncated_compound(int a) { a *= 0.75; a += 1.9; a -= 0.1f; return a; }
int divided_compound(int a, int b) { a /= b; a %= 5; return a; }
int narrowed(int a) { char c = a; unsigned char u = a; short s = a * 3; return c * 1000000 + u * 1000 + s; }
int from_long(long long a) { int low = a; return low; }
int of_bool(int a, int b) {
  bool some = a + b;
  int both = a && b, either = a || b;
  return some + 2 * both + 4 * either + 8 * (a && !b) + 16 * !a;
}
int bool_of_fraction(float a) { bool some = a; return some; }
float product(float a, float b) { return a * b; }
float third(float a) { return a / 3; }
float sums(float a, float b) { float s = 0; for (int i = 0; i < 7; ++i) s += a * b + 0.1f; return s; }
double mixed(float a, double b) { return a * b + a * 0.1f + kScale; }
float of_large_int(int a) { return a * 1.0f; }
float literal_of_double(float a) { return a + 0.1; }
int rounded(float a) { return (int)(a + 0.5f) + int(a * 10) + static_cast<int>(a / 0.3f); }
double over_zero(double a, int b) { return a / b; }
float roots(float a) { return std::sqrt(a) + sqrtf(a) + std::floor(a) + std::ceil(a); }
double halves(double a, float b) { return std::round(a) * 100 + roundf(b) + std::trunc(a) + round(a * 0.5); }
int kind_of(double a) { return std::isnan(a) ? 1 : !std::isinf(a) ? 4 + std::isfinite(a) : a > 0 ? 2 : 3; }
long long refused(double a) {
  long long k = kind_of(sqrt(a)) * 8 + kind_of(std::log(a));
  k = (k * 8 + kind_of(log2(a))) * 8 + kind_of(log10(a));
  k = (k * 8 + kind_of(log1p(a))) * 8 + kind_of(expm1(a * 200));
  k = (k * 8 + kind_of(exp(a * 200))) * 8 + kind_of(exp2(a * 400));
  k = (k * 8 + kind_of(asin(a))) * 8 + kind_of(acos(a));
  k = (k * 8 + kind_of(acosh(a))) * 8 + kind_of(atanh(a));
  k = (k * 8 + kind_of(cosh(a * 400))) * 8 + kind_of(sinh(a * 400));
  return (k * 8 + kind_of(lgamma(a))) * 8 + kind_of(std::exp(200 * (float)a));
}
long long refused_of_large(double a, double b) {
  long long k = kind_of(sin(a / b)) * 8 + kind_of(cos(a / b));
  k = (k * 8 + kind_of(tan(a / b))) * 8 + kind_of(tanh(a / b));
  k = (k * 8 + kind_of(ceil(a / b))) * 8 + kind_of(std::floor(a / b));
  k = (k * 8 + kind_of(round(a / b))) * 8 + kind_of(trunc(a / b));
  k = (k * 8 + kind_of(rint(a / b))) * 8 + kind_of(fabs(a / b));
  k = (k * 8 + kind_of(pow(a, b - 8))) * 8 + kind_of(pow(a / b, b));
  k = (k * 8 + kind_of(fmod(a, b))) * 8 + kind_of(pow(a * 1e200, 2));
  return (k * 8 + kind_of(a + INFINITY)) * 8 + kind_of(NAN * b);
}
double of_nan(double a, double b) { return fmax(a / b, b) * 3 + fmin(b, a / b) + fmin(0 / b, a); }
float of_infinity(float a, float b) { return std::max(a / b, b) - std::min(1 / a, b) * std::copysign(1.0f, b); }
double zeros(double a) { return 1 / ceil(a / 10) + 2 / round(a / 20) + 4 / trunc(a / 10) + 8 / rint(a / 20); }
double halfway(double a) { return rint(a) * 1000 + round(a) * 100 + copysign(3, a) * 10 + hypot(a * 0, 4); }
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
int twice_scoped(int a) { int found = 0; { int b = a; found += b; } { float b = a * 0.5f; found += b; } return found; }
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
  auto more = [&](int k) {
    s += k--;
    return s * k;
  };
  for (int i = 0; i < s && i < 5; ++i) more(i);
  return s * 10 + more(by);
}
int counter_outside(int n) { int i; for (i = 0; i < n; ++i) { if (i == 9) break; } return i; }
int steps(int n) {
  int s = 0;
  for (int i = 1; i <= n; i += 3) s += i;
  for (int i = n; i > 0; i -= 2) s += i * 2;
  for (int i = n - 1; i >= 0; --i) s -= i;
  for (int i = 1; i < n; i *= 2) s += 1000;
  for (int i = n; i > 0; i >>= 1) s += 7;
  return s;
}
int unsigned_countdown(unsigned n) { int s = 0; for (unsigned i = n; i > 0; --i) s += 1 + i; return s; }
int two_counters(int n) { int s = 0; for (int i = 0, j = n; i < j; ++i, --j) s += j - i; return s; }
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
  do {
    s *= 2;
  } while (0);
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
void bump(int& n, float& f, int by) { n += by; f *= 0.1f; }
int counted(int n, int& seen) { seen = seen + 1; return n * seen; }
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
int alias_of(int a) { int n = a; int& other = n; other += 5; const int& kept = n; n *= 2; return kept - other + n; }
template <typename T>
T ceil_of(T a, T b) { return (a + b - 1) / b; }
template <typename T>
inline T half_of(T a) { return a / 2; }
int instances(int a, float b, unsigned c) {
  return ceil_of(a, 4) * 100 + static_cast<int>(half_of(b) * 8) + half_of(a) + (half_of(c - 5) > 1000) +
         half_of<int>(a * 3);
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
int lucky(int n) { if (n % 2 == 0) return 64; else if (n > 5) return -n; return 0; }

struct Pair {
  int a;
  int b;
};
enum class Mode { A = 2, B, C = 7 };
enum Flags { F1 = 1 << 1, F2 = F1 | 8, F3 };
#define INC(x) (x)++
struct Inner {
  int a;
  float f;
  int twice() const { return a * 2; }
};
struct Outer {
  Inner inn;
  int n;
  int sum() const { return inn.a + n; }
  int plus(int k) const { return n + k * inn.a; }
};
struct Made {
  int a;
  int b;
  float c;
  Made(int x, int y) : a(x + 1), b(y) { c = a * 0.5f; }
  int area() const { return a * b; }
};
struct Two {
  int a;
  int b;
  Two() : a(3), b(4) {}
  Two(int x) : a(x), b{x * 2} {}
};
struct Valued {
  int a = 7;
  int b = 2 * 3;
  bool on = true;
};
struct Nest {
  struct Deep { int q; };
  Deep d;
  int r;
};
struct Self {
  int a;
  Self(int a) : a(a) { this->a += 1; }
  int get(int a) const { return this->a * 10 + a; }
};
constexpr int cdiv(int a, int b) { return (a + b - 1) / b; }
namespace one { int within(int a) { return a + 1; } namespace two { int within(int a) { return a + 2; } int by(int a) { return within(a); } } }
struct Left { static int get() { return 1; } };
struct Right { static int get() { return 2; } };
int spaces(int a) { return one::within(a) * 10000 + one::two::within(a) * 100 + one::two::by(a) + Left::get() * 3 + Right::get(); }
Pair pair_of(int a) { return {a, a + 1}; }
int braced_struct(int a) { Pair p = pair_of(a), q = pair_of(p.b); return p.a + q.b * 10 + pair_of(4).b; }
std::tuple<int, float> tuple_of(int a) { return {a * 0.5, a}; }
int braced_tuple(int a) {
  auto [x, y] = tuple_of(a);
  std::tuple<int, int> t = {x, y * 0.3f};
  return x * 10 + (y / 2 > x) + std::get<1>(t) * 100;
}
int signed_of_hash(unsigned a, int b) {
  int h = a * 2654435761u, k = b & ~0x0fu;
  return h % 7 + k / 3 + (int)(a | 0xf0000000u);
}
int ternary_effects(int a, int b) { int n = a; int r = a > b ? n++ : n--; return r * 100 + n; }
int range_copy(int n) {
  std::vector<int> v = {n, 2};
  for (auto x : v) {
    x += 1;
    n += x;
  }
  return n * 100 + v[0] + v[1];
}
int range_array(int n) { int v[3] = {1, n, 2}; int s = 0; for (const int& x : v) s += x * x; return s; }
int binding_pair(int n) { auto [a, b] = std::make_pair(n, n * 2); a += 1; return a * b; }
int binding_tuple(int n) {
  std::tuple<int, int, int> t{n, n + 1, n + 2};
  auto [a, b, c] = t;
  b = 9;
  return a + b * c + std::get<1>(t);
}
int static_const(int n) { static const int w = 32; return cdiv(n, w); }
int pre_index(int n) { int v[4] = {5, 6, 7, n}; int i = 0; v[++i] = n; return v[0] + v[1] * 10 + i * 100; }
int struct_pair(int n) { Pair p{n, 2}; Pair q = p; q.a += 1; return p.a * 100 + q.a * 10 + q.b; }
int struct_assign(int n) { Pair p; p.a = n; p.b = 3; Pair q; q = p; q.b = 9; return p.a + p.b * 10 + q.b * 100; }
int struct_ref(int n) { Pair p{n, 1}; Pair& q = p; q.a = 4; return p.a * 10 + p.b; }
int enum_class(int n) { Mode m = n > 2 ? Mode::B : Mode::C; return m == Mode::B ? 1 : static_cast<int>(m); }
int enum_switch(int n) {
  switch (static_cast<Mode>(n)) {
    case Mode::A:
      return 20;
    case Mode::B:
      return 30;
    default:
      break;
  }
  return n;
}
int short_circuit(int a, int b) {
  int n = 0;
  bool r = a > 0 && (n += 5) > b;
  bool q = a > 0 || (n += 7) > 3;
  return n * 4 + r * 2 + q;
}
int assign_chain(int a) { int x, y, z; x = y = z = a + 1; y += 1; return x + y * 10 + z * 100; }
int assign_chain_types(float a) { int x; float y; y = x = a; return (int)(y * 10) + x; }
int int_of_char(int a) { char c = 'a' + a; return c; }
int u8_arith(int a) { uint8_t x = a, y = 200; uint8_t z = x + y; return z + (x + y); }
int u16_shift(int a) { uint16_t x = a; x <<= 4; return x; }
int i8_neg(int a) { int8_t x = a; x = -x; return x; }
int bool_arith(int a) { bool b = a; b += 2; return b + b; }
int bool_not(int a) { return !a + !!a * 2 + ~a; }
int macro_inc(int a) { int b = INC(a); return a * 10 + b; }
int nested_break(int n) {
  int s = 0;
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) {
      if (j > i) break;
      if (j == 1) continue;
      s += j + 1;
    }
  }
  return s;
}
int switch_fall(int n) {
  int s = 0;
  switch (n % 5) {
    case 0:
      s += 1;
    case 1:
      s += 10;
    case 2:
      s += 100;
      break;
    case 3: {
      s += 5;
    }
    default:
      s += 1000;
  }
  return s;
}
int shadow_for(int i) { for (int i = 0; i < 4; i++) { } return i; }
int else_if(int n) {
  if (n < 0) return 1;
  else if (n == 0) {
    n = 5;
  } else if (n < 3) n += 10;
  else {
    n = -n;
  }
  return n;
}
int dangling(int a, int b) { int r = 0; if (a) if (b) r = 1; else r = 2; return r; }
int vec_copy(int n) { std::vector<int> v{1, n}; auto w = v; w[0] = 9; return v[0] * 10 + w[0] + v[1]; }
int vec_ref(int n) { std::vector<int> v{1, n}; auto& w = v; w[0] = 9; return v[0] * 10 + w[0] + v[1]; }
int arr_std(int n) { std::array<int, 3> a = {n, 1, 2}; auto b = a; b[0] = 5; return a[0] * 10 + b[0] + a.size(); }
int lam_val(int n) { int k = n; auto f = [k](int x) { return x * k; }; return f(3) + f(2); }
void take_vec(std::vector<int>& v, int n) { v.push_back(n); v[0] += n; }
int out_vec(int a) { std::vector<int> v{1}; take_vec(v, a); return v[0] * 100 + v[1] + v.size(); }
void take_copy(std::vector<int> v, int n) { v[0] += n; }
int out_copy(int a) { std::vector<int> v{1}; take_copy(v, a); return v[0]; }
void take_pair(Pair& p) { p.a += 5; }
void take_pair_copy(Pair p) { p.a += 50; }
int out_pair(int a) { Pair p{a, 1}; take_pair(p); take_pair_copy(p); return p.a; }
template <int N> int tmpl_int(int a) { return a * N; }
int tmpl_use(int a) { return tmpl_int<3>(a) + tmpl_int<4>(a); }
int ov(int a) { return 1; }
int ov(unsigned a) { return 2; }
int ov(double a) { return 3; }
int ov_use(int a, float b) { return ov(a) * 100 + ov((unsigned)a) * 10 + ov(b); }
int cond_prec(int a, int b) { return a > 1 || b > 1 && a < 0 ? 1 : 2; }
int cmp_prec(int a, int b) { return a << 1 < b; }
int bit_prec(int a, int b) { return a & 3 + b | 4 ^ 1; }
int not_prec(int a, int b) { return !(a & b) + ~a * b; }
int compound_bits(int a) { a |= 6; a &= ~2; a ^= 9; a <<= 1; a >>= 2; return a; }
int compound_mixed(int a) { a /= 0.3; a -= 2.5; return a; }
unsigned compound_u(unsigned a) { a -= 10; a /= 3; a %= 1000; return a; }
size_t size_minus(int n) { std::vector<int> v(n & 3); return v.size() - 1; }
int size_loop(int n) { std::vector<int> v(n & 3); int s = 0; for (size_t i = 0; i + 1 < v.size(); ++i) s++; return s; }
int int_vs_size(int a) { std::vector<int> v(2); return a < v.size(); }
unsigned lit_u(int a) { return a - 1u; }
int hex_neg(int a) { return (int)0xFFFFFFFF + a; }
int using_alias(int a) { using T = float; T x = a; x /= 2; return x * 10; }
int auto_types(int a) { auto x = a / 2; auto y = a / 2.0; auto z = 3u - a; return x * 100 + (int)(y * 10) + (z > 10); }
int const_expr(int a) { constexpr int k = 3 * 4; const auto m = k / 5; return a * m + k; }
int if_constexpr(int a) { if constexpr (sizeof(int) == 4) { a += 1; } else { a += 100; } return a; }
int s_nested(int n) {
  Outer o;
  o.inn.a = n;
  o.inn.f = 1.5f;
  o.n = 2;
  Outer p = o;
  p.inn.a += 5;
  return o.inn.a * 100 + p.inn.a + o.n;
}
int s_methods(int n) { Outer o; o.inn.a = n; o.n = 2; return o.sum() * 100 + o.inn.twice() + o.plus(3); }
int s_assign(int n) { Inner i; i.a = n; Outer o; o.inn = i; i.a = 9; o.n = 1; return o.inn.a + i.a * 10; }
int s_copy_inner(int n) { Outer o; o.n = 1; o.inn.a = n; Inner i = o.inn; i.a += 3; return o.inn.a * 10 + i.a; }
int s_auto_inner(int n) { Outer o; o.n = 1; o.inn.a = n; auto i = o.inn; i.a += 3; return o.inn.a * 10 + i.a; }
int s_made(int n) { Made m(n, n * 3); return m.area() * 10 + (int)(m.c * 4); }
int s_made2(int n) { Made m{n, 5}; m.a = 2; return m.area() + m.b; }
int s_made3(int a) { int x = 2, y = a; Made m(y, x); return m.a * 100 + m.b; }
int s_two(int n) { Two t; Two u(n); return t.a + t.b * 10 + u.a * 100 + u.b * 1000; }
int s_valued(int n) { Valued v; v.a += n; return v.a + v.b * 10 + v.on * 100; }
int s_valued2(int n) { Valued v{n}; return v.a + v.b * 10; }
int s_valued3(int n) { Valued v{}; return v.a + n; }
int s_deep(int n) { Nest k; k.d.q = n; k.r = 4; return k.d.q * 10 + k.r; }
int s_self(int n) { Self s(n); return s.get(n + 1) + s.get(4); }
int s_self2(int n) { Self s(n); Self t(s); t.a = 1; return s.a * 10 + t.a; }
int s_arr(int n) { Made m(n, n + 1); Made k = m; k.a += m.area(); return k.a + k.area() * 2; }
void halves_of(int n, int* low, int* high) { *low = n / 2; (*high) = n - *low; if (n > 4) (*high)++; *high -= 3; }
int out_pointers(int a) { int x, y = 7; halves_of(a, &x, &y); return x * 1000 + y; }
void set_to(int n, int& to) { to = n * 3; }
int out_unset(int a) { int x; set_to(a, x); return x; }
int clamped(int a, int b) { return std::clamp(a, -3, b < -3 ? 2 : b); }
float clamped_float(float a) { return std::clamp(a / 0.3f, -1.5f, 5.25f) + std::clamp<float>(2, a, 9.5); }
int summed(int a, long long b) { std::vector<int64_t> v = {a, b, 4}; return std::accumulate(v.begin(), v.end(), 1); }
int extremes_of(int a, int b) {
  std::vector<int> v = {a, b, 3};
  return *std::max_element(v.begin(), v.end()) * 100 - *std::min_element(v.begin(), v.end());
}
unsigned cursors(unsigned a) {
  std::vector<unsigned> v(8);
  for (int i = 0; i < 8; ++i) v[i] = a * i;
  unsigned* p = &v[1] + 2;
  unsigned s = *p;
  p += 2;
  p[1] = s ^ 5;
  p--;
  auto q = p + 1;
  *q |= 3;
  return s + p[0] * 3 + v[6] + v[5] + *(v.data() + 2);
}
int made_array(int a) {
  int* m = new int[4];
  int n = 0;
  while (n < 4) m[n++] = a + n;
  int* q = m;
  q++;
  q[0] = 9;
  int r = m[1] * 100 + m[3] - q[-1];
  delete[] m;
  return r;
}
int zeroed(int a) { std::vector<int> v = {a, a + 1, 7}; memset(&v[1], 0, sizeof(int)); return v[0] + v[1] * 10 + v[2]; }
int compared_twice(int a, int b) { if (a < 4 && b > (2)) return 1; return a < b || a > (3); }
int told_by_text(int a) { return std::atoi(" -12x") + std::atoi("x3") * a + std::atoi("+7 8"); }
int declared_in_condition(int a) { int n = 3; if (int n = a / 3) a += n; else a -= 7; return a * 10 + n; }
template <int N, typename T> T times(T a) { return a * N; }
int template_of_second(float a) { return times<3, int>(a) + times<2>(a); }
int bound_to_result(int a) { const auto& k = quotient(a, 2); int b = k + 1; set_to(k, b); return b - k; }

#ifdef __CUDACC__
__global__ void nothing(float* x) {}
void all(float* x) {
  nothing<<<1, 1>>>(x);
  // CALLS
}
#endif
