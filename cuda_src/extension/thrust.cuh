// In the place of <thrust/...>, which has host code: the algorithms that a thread of a kernel calls. There, whatever their
// policy, they run in that thread, in order.
#pragma once

#include "extension/standard.cuh"

namespace thrust {

namespace detail {
struct policy {};
template <typename It>
using value_of = std::decay_t<decltype(**static_cast<It*>(nullptr))>;
}  // namespace detail

constexpr detail::policy device{}, seq{};

using std::divides;
using std::equal_to;
using std::greater;
using std::greater_equal;
using std::less;
using std::less_equal;
using std::minus;
using std::modulus;
using std::multiplies;
using std::plus;
using std::swap;

#define CUPYOPS_CHOICE(name, sign)                                                    \
  template <typename T = void>                                                        \
  struct name {                                                                       \
    constexpr T operator()(const T& a, const T& b) const { return a sign b ? a : b; } \
  };                                                                                  \
  template <>                                                                         \
  struct name<void> {                                                                 \
    template <typename T>                                                             \
    constexpr T operator()(const T& a, const T& b) const {                            \
      return a sign b ? a : b;                                                        \
    }                                                                                 \
  };
CUPYOPS_CHOICE(maximum, >)
CUPYOPS_CHOICE(minimum, <)
#undef CUPYOPS_CHOICE

template <typename A, typename B>
struct pair {
  A first;
  B second;
};
template <typename A, typename B>
pair<A, B> make_pair(A first, B second) {
  return {first, second};
}

// --- each element for itself ---

template <typename It, typename F>
It for_each(detail::policy, It first, It last, F f) {
  for (; first != last; ++first) f(*first);
  return last;
}
template <typename It, typename N, typename F>
It for_each_n(detail::policy, It first, N n, F f) {
  for (N i = 0; i < n; ++i, ++first) f(*first);
  return first;
}
template <typename It, typename T>
void fill(detail::policy, It first, It last, const T& value) {
  for (; first != last; ++first) *first = value;
}
template <typename It, typename N, typename T>
It fill_n(detail::policy, It first, N n, const T& value) {
  for (N i = 0; i < n; ++i, ++first) *first = value;
  return first;
}
template <typename It, typename Out>
Out copy(detail::policy, It first, It last, Out out) {
  for (; first != last; ++first, ++out) *out = *first;
  return out;
}
template <typename It, typename N, typename Out>
Out copy_n(detail::policy, It first, N n, Out out) {
  for (N i = 0; i < n; ++i, ++first, ++out) *out = *first;
  return out;
}
template <typename It>
void sequence(detail::policy, It first, It last) {
  for (detail::value_of<It> value = 0; first != last; ++first, value = value + 1) *first = value;
}
template <typename It, typename Out, typename F>
Out transform(detail::policy, It first, It last, Out out, F f) {
  for (; first != last; ++first, ++out) *out = f(*first);
  return out;
}
template <typename It, typename Other, typename Out, typename F>
Out transform(detail::policy, It first, It last, Other other, Out out, F f) {
  for (; first != last; ++first, ++other, ++out) *out = f(*first, *other);
  return out;
}

// --- sums ---

template <typename It, typename T, typename F>
T reduce(detail::policy, It first, It last, T sum, F f) {
  for (; first != last; ++first) sum = f(sum, *first);
  return sum;
}
template <typename It, typename T>
T reduce(detail::policy, It first, It last, T sum) {
  for (; first != last; ++first) sum = sum + *first;
  return sum;
}
template <typename It>
detail::value_of<It> reduce(detail::policy, It first, It last) {
  return thrust::reduce(seq, first, last, detail::value_of<It>(0));
}
template <typename It, typename Map, typename T, typename F>
T transform_reduce(detail::policy, It first, It last, Map map, T sum, F f) {
  for (; first != last; ++first) sum = f(sum, map(*first));
  return sum;
}
template <typename It, typename Other, typename T>
T inner_product(detail::policy, It first, It last, Other other, T sum) {
  for (; first != last; ++first, ++other) sum = sum + *first * *other;
  return sum;
}
template <typename It, typename Out, typename F>
Out inclusive_scan(detail::policy, It first, It last, Out out, F f) {
  if (first == last) return out;
  detail::value_of<It> sum = *first;
  *out = sum;
  while (++first != last) *++out = sum = f(sum, *first);
  return ++out;
}
template <typename It, typename Out>
Out inclusive_scan(detail::policy, It first, It last, Out out) {
  return thrust::inclusive_scan(seq, first, last, out, plus<detail::value_of<It>>());
}
template <typename It, typename Out, typename T, typename F>
Out exclusive_scan(detail::policy, It first, It last, Out out, T sum, F f) {
  for (; first != last; ++first, ++out) {
    const T next = f(sum, *first);  // `out` may be `first`
    *out = sum;
    sum = next;
  }
  return out;
}
template <typename It, typename Out, typename T>
Out exclusive_scan(detail::policy, It first, It last, Out out, T sum) {
  return thrust::exclusive_scan(seq, first, last, out, sum, plus<T>());
}
template <typename It, typename Out>
Out exclusive_scan(detail::policy, It first, It last, Out out) {
  return thrust::exclusive_scan(seq, first, last, out, detail::value_of<It>(0));
}

// --- search ---

template <typename It, typename F>
It find_if(detail::policy, It first, It last, F f) {
  while (first != last && !f(*first)) ++first;
  return first;
}
template <typename It, typename T>
It find(detail::policy, It first, It last, const T& value) {
  while (first != last && !(*first == value)) ++first;
  return first;
}
template <typename It, typename F>
long long count_if(detail::policy, It first, It last, F f) {
  long long found = 0;
  for (; first != last; ++first) found += f(*first) ? 1 : 0;
  return found;
}
template <typename It, typename T>
long long count(detail::policy, It first, It last, const T& value) {
  long long found = 0;
  for (; first != last; ++first) found += *first == value ? 1 : 0;
  return found;
}
template <typename It>
It max_element(detail::policy, It first, It last) {
  It found = first;
  for (; first != last; ++first) found = *found < *first ? first : found;
  return found;
}
template <typename It>
It min_element(detail::policy, It first, It last) {
  It found = first;
  for (; first != last; ++first) found = *first < *found ? first : found;
  return found;
}
template <typename It, typename T>
It lower_bound(detail::policy, It first, It last, const T& value) {
  while (first != last) {
    It middle = first + (last - first) / 2;
    if (*middle < value) first = middle + 1;
    else last = middle;
  }
  return first;
}
template <typename It, typename T>
It upper_bound(detail::policy, It first, It last, const T& value) {
  while (first != last) {
    It middle = first + (last - first) / 2;
    if (value < *middle) last = middle;
    else first = middle + 1;
  }
  return first;
}
template <typename It, typename T>
bool binary_search(detail::policy, It first, It last, const T& value) {
  It found = thrust::lower_bound(seq, first, last, value);
  return found != last && !(value < *found);
}

// --- order: by insertion, which is stable, for the few elements that a thread has ---

template <typename It, typename F>
void stable_sort(detail::policy, It first, It last, F before) {
  for (It one = first; one != last; ++one) {
    detail::value_of<It> value = *one;
    It place = one;
    for (; place != first && before(value, *(place - 1)); --place) *place = *(place - 1);
    *place = value;
  }
}
template <typename It, typename Values, typename F>
void stable_sort_by_key(detail::policy, It first, It last, Values values, F before) {
  for (It one = first; one != last; ++one) {
    detail::value_of<It> key = *one;
    detail::value_of<Values> value = values[one - first];
    It place = one;
    for (; place != first && before(key, *(place - 1)); --place) {
      *place = *(place - 1);
      values[place - first] = values[place - first - 1];
    }
    *place = key;
    values[place - first] = value;
  }
}
template <typename It, typename F>
void sort(detail::policy, It first, It last, F before) {
  thrust::stable_sort(seq, first, last, before);
}
template <typename It, typename Values, typename F>
void sort_by_key(detail::policy, It first, It last, Values values, F before) {
  thrust::stable_sort_by_key(seq, first, last, values, before);
}
template <typename It>
void stable_sort(detail::policy, It first, It last) {
  thrust::stable_sort(seq, first, last, less<detail::value_of<It>>());
}
template <typename It>
void sort(detail::policy, It first, It last) {
  thrust::stable_sort(seq, first, last);
}
template <typename It, typename Values>
void stable_sort_by_key(detail::policy, It first, It last, Values values) {
  thrust::stable_sort_by_key(seq, first, last, values, less<detail::value_of<It>>());
}
template <typename It, typename Values>
void sort_by_key(detail::policy, It first, It last, Values values) {
  thrust::stable_sort_by_key(seq, first, last, values);
}

// --- the same without a policy ---

#define CUPYOPS_WITHOUT(name)                       \
  template <typename It, typename... Rest>          \
  auto name(It first, It last, Rest... rest) {      \
    return thrust::name(seq, first, last, rest...); \
  }
CUPYOPS_WITHOUT(for_each)
CUPYOPS_WITHOUT(fill)
CUPYOPS_WITHOUT(copy)
CUPYOPS_WITHOUT(sequence)
CUPYOPS_WITHOUT(transform)
CUPYOPS_WITHOUT(reduce)
CUPYOPS_WITHOUT(transform_reduce)
CUPYOPS_WITHOUT(inner_product)
CUPYOPS_WITHOUT(inclusive_scan)
CUPYOPS_WITHOUT(exclusive_scan)
CUPYOPS_WITHOUT(find_if)
CUPYOPS_WITHOUT(find)
CUPYOPS_WITHOUT(count_if)
CUPYOPS_WITHOUT(count)
CUPYOPS_WITHOUT(max_element)
CUPYOPS_WITHOUT(min_element)
CUPYOPS_WITHOUT(lower_bound)
CUPYOPS_WITHOUT(upper_bound)
CUPYOPS_WITHOUT(binary_search)
CUPYOPS_WITHOUT(stable_sort)
CUPYOPS_WITHOUT(sort)
CUPYOPS_WITHOUT(stable_sort_by_key)
CUPYOPS_WITHOUT(sort_by_key)
#undef CUPYOPS_WITHOUT

}  // namespace thrust
