#include "cast.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "testing.h"

namespace torchbeast {
namespace {

template <typename T>
constexpr DType dtype_of() {
  const std::uint8_t code = std::is_floating_point_v<T> ? kFloat
                            : std::is_signed_v<T>       ? kInt
                                                        : kUInt;
  return {code, 8 * sizeof(T), 1};
}

constexpr DType kBoolean{kBool, 8, 1}, kHalf{kFloat, 16, 1}, kBrain{4, 16, 1};

template <typename T>
Array numbers(const std::vector<T>& values) {
  return make_array_of<T>(dtype_of<T>(), {1, static_cast<std::int64_t>(values.size())}, values);
}

// Whether a number arrives as it was.
template <typename To, typename From>
bool survives(From number) {
  const Array target = numbers<To>({To{1}});
  if (cast(numbers<From>({number}), target)) return false;
  CHECK(values_of<To>(target)[0] == static_cast<To>(number));
  return true;
}

template <typename T>
using Limits = std::numeric_limits<T>;

}  // namespace

TEST_CASE_TEMPLATE("integers of every width become each other", From, std::int8_t, std::int16_t,
                   std::int32_t, std::int64_t, std::uint8_t, std::uint16_t, std::uint32_t,
                   std::uint64_t) {
  CHECK(survives<std::int8_t, From>(17));
  CHECK(survives<std::int16_t, From>(17));
  CHECK(survives<std::int32_t, From>(17));
  CHECK(survives<std::int64_t, From>(17));
  CHECK(survives<std::uint8_t, From>(17));
  CHECK(survives<std::uint16_t, From>(17));
  CHECK(survives<std::uint32_t, From>(17));
  CHECK(survives<std::uint64_t, From>(17));
  CHECK(survives<float, From>(17));
  CHECK(survives<double, From>(17));
}

TEST_CASE("integers out of range do not fit") {
  CHECK(survives<std::uint8_t>(255));
  CHECK_FALSE(survives<std::uint8_t>(256));
  CHECK_FALSE(survives<std::uint8_t>(-1));
  CHECK(survives<std::int8_t>(-128));
  CHECK_FALSE(survives<std::int8_t>(-129));
  CHECK(survives<std::int64_t>(std::uint64_t{1} << 62));
  CHECK_FALSE(survives<std::int64_t>(std::uint64_t{1} << 63));
  CHECK_FALSE(survives<std::uint64_t>(Limits<std::int64_t>::min()));
  CHECK(survives<std::uint64_t>(Limits<std::int64_t>::max()));
}

TEST_CASE_TEMPLATE("floats become integers if they hold whole numbers in range", From, float,
                   double) {
  CHECK(survives<std::int64_t, From>(From{-3}));
  CHECK(survives<std::int64_t, From>(From{-0.0}));
  CHECK_FALSE(survives<std::int64_t, From>(From{0.5}));
  CHECK(survives<std::uint8_t, From>(From{255}));
  CHECK_FALSE(survives<std::uint8_t, From>(From{256}));
  CHECK_FALSE(survives<std::uint8_t, From>(From{-1}));
  CHECK(survives<std::int64_t, From>(-std::ldexp(From{1}, 63)));
  CHECK_FALSE(survives<std::int64_t, From>(std::ldexp(From{1}, 63)));
  CHECK(survives<std::uint64_t, From>(std::ldexp(From{1}, 63)));
  CHECK_FALSE(survives<std::uint64_t, From>(std::ldexp(From{1}, 64)));
  CHECK_FALSE(survives<std::int64_t, From>(Limits<From>::infinity()));
  CHECK_FALSE(survives<std::int64_t, From>(Limits<From>::quiet_NaN()));
}

TEST_CASE("floats of another width are rounded, but not cut off") {
  CHECK(survives<double>(0.1F));
  CHECK(survives<float>(0.1));
  CHECK(survives<float>(-Limits<double>::infinity()));
  CHECK_FALSE(survives<float>(1e300));
  const Array target = numbers<float>({0});
  CHECK_FALSE(cast(numbers<double>({std::nan("")}), target));
  CHECK(std::isnan(values_of<float>(target)[0]));
}

TEST_CASE("agents may compute in half precision") {
  const auto to_float = [](DType dtype, std::uint16_t bits) {
    const Array target = numbers<float>({0});
    CHECK_FALSE(cast(make_array_of<std::uint16_t>(dtype, {1, 1}, {bits}), target));
    return values_of<float>(target)[0];
  };
  CHECK(to_float(kHalf, 0x3C00) == 1.0F);
  CHECK(to_float(kHalf, 0xC500) == -5.0F);
  CHECK(to_float(kHalf, 0x7BFF) == 65504.0F);
  CHECK(to_float(kHalf, 0x0001) == std::ldexp(1.0F, -24));  // The smallest there is.
  CHECK(to_float(kHalf, 0xFC00) == -Limits<float>::infinity());
  CHECK(std::isnan(to_float(kHalf, 0x7E00)));
  CHECK(to_float(kBrain, 0x3F80) == 1.0F);
  CHECK(to_float(kBrain, 0xC040) == -3.0F);
}

TEST_CASE("bools are 0 and 1") {
  const Array target = make_array_of<std::uint8_t>(kBoolean, {1, 2}, {9, 9});
  CHECK_FALSE(cast(numbers<float>({0, 1}), target));
  CHECK(values_of<std::uint8_t>(target) == std::vector<std::uint8_t>{0, 1});
  CHECK(cast(numbers<std::int64_t>({0, 2}), target));
  const Array back = numbers<std::int64_t>({9, 9});
  CHECK_FALSE(cast(target, back));
  CHECK(values_of<std::int64_t>(back) == std::vector<std::int64_t>{0, 1});
}

TEST_CASE("what does not fit is named, and nothing is written") {
  const Array target = numbers<std::int16_t>({7, 7});
  CHECK(cast(numbers<float>({1, 0.1F}), target) == " with the value 0.1, which int16 cannot hold");
  CHECK(cast(numbers<std::int64_t>({1, 40000}), target) ==
        " with the value 40000, which int16 cannot hold");
  CHECK(cast(numbers<double>({1e300, 0}), target) ==
        " with the value 1e+300, which int16 cannot hold");
  CHECK(cast(numbers<double>({1, Limits<double>::quiet_NaN()}), target) ==
        " with the value nan, which int16 cannot hold");
  const DType complex{kComplex, 64, 1};
  CHECK(cast(make_array_of<float>(complex, {1, 2}, {1, 0, 1, 0}), target) ==
        ", which cannot be converted");
  CHECK(values_of<std::int16_t>(target) == std::vector<std::int16_t>{7, 7});
}

TEST_CASE("arrays of any strides are converted") {
  Array source = numbers<std::int32_t>({1, 2, 3, 4});
  source.shape = {2, 2};
  source.strides = {1, 2};  // Transposed.
  Array target = numbers<std::int64_t>({0, 0, 0, 0, 0, 0});
  target.shape = {2, 2};
  target.strides = {3, 1};  // With gaps.
  CHECK_FALSE(cast(source, target));
  CHECK(values_of<std::int64_t>(target) == std::vector<std::int64_t>{1, 3, 2, 4});
}

TEST_CASE("an array without elements is converted to one") {
  CHECK_FALSE(cast(numbers<std::int32_t>({}), numbers<std::int64_t>({})));
}

}  // namespace torchbeast
