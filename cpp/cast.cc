#include "cast.h"

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchbeast {
namespace {

constexpr std::uint8_t kBfloat = 4;  // DLPack's code.

// How an element lies in memory (Stored) and the number that it stands for.
template <typename T>
struct Plain {
  using Stored = T;
  using Number = T;
  static Number load(Stored stored) { return stored; }
};

struct Bool {
  using Stored = std::uint8_t;
  using Number = bool;
  static Number load(Stored stored) { return stored != 0; }
};

struct Bfloat16 {
  using Stored = std::uint16_t;
  using Number = float;
  static Number load(Stored stored) {
    const std::uint32_t bits = std::uint32_t{stored} << 16;  // It is the upper half of a float.
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  using Number = float;
  static Number load(Stored stored) {
    const float sign = (stored >> 15) != 0 ? -1.0F : 1.0F;
    const int exponent = (stored >> 10) & 0x1F;
    const int mantissa = stored & 0x3FF;
    if (exponent == 0x1F) {
      return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                           : sign * std::numeric_limits<float>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
    return sign * std::ldexp(static_cast<float>(mantissa + 0x400), exponent - 25);
  }
};

template <typename To, typename From>
bool integer_fits(From value) {
  if constexpr (std::is_signed_v<From>) {
    if (value < 0) {
      return std::is_signed_v<To> &&
             std::int64_t{value} >= static_cast<std::int64_t>(std::numeric_limits<To>::min());
    }
  }
  return static_cast<std::uint64_t>(value) <=
         static_cast<std::uint64_t>(std::numeric_limits<To>::max());
}

template <typename To, typename From>
bool fits(From value) {
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    return integer_fits<To>(value);
  } else if constexpr (std::is_integral_v<To>) {
    // Powers of two, which are exact; the largest integer itself may not be.
    const From end = std::ldexp(From{1}, std::numeric_limits<To>::digits);
    const From begin = std::is_signed_v<To> ? -end : From{0};
    return value == std::trunc(value) && begin <= value && value < end;
  } else if constexpr (std::is_floating_point_v<From>) {
    return !std::isfinite(value) || sizeof(From) <= sizeof(To) ||
           std::abs(value) <= static_cast<From>(std::numeric_limits<To>::max());
  } else {
    return true;
  }
}

// The number as text, with enough digits to distinguish it from its neighbours.
template <typename Number>
std::string text_of(Number value) {
  if constexpr (std::is_integral_v<Number>) {
    return std::to_string(value);
  } else {
    char text[32];
    for (int digits = 6; digits <= std::numeric_limits<Number>::max_digits10; ++digits) {
      std::snprintf(text, sizeof(text), "%.*g", digits, static_cast<double>(value));
      if (static_cast<Number>(std::strtod(text, nullptr)) == value) break;
    }
    return text;
  }
}

// Calls visit(type) if the dtype can be written; else returns false.
template <typename Visit>
bool visit_target(DType dtype, Visit visit) {
  if (dtype.lanes != 1) return false;
  switch (dtype.code << 8 | dtype.bits) {
    case kInt << 8 | 8: visit(Plain<std::int8_t>()); return true;
    case kInt << 8 | 16: visit(Plain<std::int16_t>()); return true;
    case kInt << 8 | 32: visit(Plain<std::int32_t>()); return true;
    case kInt << 8 | 64: visit(Plain<std::int64_t>()); return true;
    case kUInt << 8 | 8: visit(Plain<std::uint8_t>()); return true;
    case kUInt << 8 | 16: visit(Plain<std::uint16_t>()); return true;
    case kUInt << 8 | 32: visit(Plain<std::uint32_t>()); return true;
    case kUInt << 8 | 64: visit(Plain<std::uint64_t>()); return true;
    case kFloat << 8 | 32: visit(Plain<float>()); return true;
    case kFloat << 8 | 64: visit(Plain<double>()); return true;
    case kBool << 8 | 8: visit(Bool()); return true;
    default: return false;
  }
}

// The same for dtypes that can be read: agents may compute in half precision.
template <typename Visit>
bool visit_source(DType dtype, Visit visit) {
  if (dtype == DType{kBfloat, 16, 1}) {
    visit(Bfloat16());
    return true;
  }
  if (dtype == DType{kFloat, 16, 1}) {
    visit(Float16());
    return true;
  }
  return visit_target(dtype, visit);
}

// Elements without gaps, in memory of their own.
struct Elements {
  explicit Elements(const Array& like) : memory(like.num_bytes()), array(like) {
    array.strides = contiguous_strides(array.shape);
    array.data = memory.data();
    array.owner = nullptr;
  }
  std::vector<char> memory;
  Array array;
};

// Converts all elements; returns the first number that does not fit, as text, if there is one.
template <typename From, typename To>
std::optional<std::string> cast_elements(const Array& source, const Array& target) {
  using Number = typename To::Number;
  for (std::int64_t i = 0; i < source.num_elements(); ++i) {
    typename From::Stored from;
    std::memcpy(&from, source.data + i * static_cast<std::int64_t>(sizeof(from)), sizeof(from));
    const typename From::Number number = From::load(from);
    if (!fits<Number>(number)) return text_of(number);
    const auto to = static_cast<typename To::Stored>(static_cast<Number>(number));
    std::memcpy(target.data + i * static_cast<std::int64_t>(sizeof(to)), &to, sizeof(to));
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> cast(const Array& source, const Array& target) {
  assert(source.shape == target.shape);
  const Elements before(source), after(target);
  copy(source, before.array);
  std::optional<std::string> misfit;
  bool is_known = false;
  visit_source(source.dtype, [&](auto from) {
    is_known = visit_target(target.dtype, [&](auto to) {
      misfit = cast_elements<decltype(from), decltype(to)>(before.array, after.array);
    });
  });
  if (!is_known) return ", which cannot be converted";
  if (misfit)
    return " with the value " + *misfit + ", which " + target.dtype.name() + " cannot hold";
  copy(after.array, target);
  return std::nullopt;
}

}  // namespace torchbeast
