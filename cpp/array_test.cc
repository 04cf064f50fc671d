#include "array.h"

#include <doctest/doctest.h>

#include "testing.h"

namespace torchbeast {

using Values = std::vector<std::int32_t>;

TEST_CASE("an array may have more dimensions than most") {
  const Array array = make_array({1, 2, 1, 1, 3, 1, 1, 2}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  const Array rows = array.slice(1, 1, 2);
  CHECK(array.shape == Shape{1, 2, 1, 1, 3, 1, 1, 2});
  CHECK(rows.shape == Shape{1, 1, 1, 1, 3, 1, 1, 2});
  CHECK(rows.shape != array.shape);
  CHECK(values(rows) == std::vector<std::int32_t>{6, 7, 8, 9, 10, 11});
}

TEST_CASE("types have the names of PyTorch") {
  CHECK(DType{kFloat, 32, 1}.name() == "float32");
  CHECK(DType{4, 16, 1}.name() == "bfloat16");
  CHECK(DType{kBool, 8, 1}.name() == "bool");
  CHECK(DType{10, 8, 1}.name() == "float8_e4m3fn");
  CHECK(DType{17, 4, 2}.name() == "float4_e2m1fn_x2");
  CHECK(DType{99, 8, 1}.name() == "code99_8");
  CHECK(DType{17, 4, 2}.itemsize() == 1);
  CHECK(DType{kComplex, 128, 1}.itemsize() == 16);
}

TEST_CASE("a slice shares memory and owner") {
  const Array array = make_array({2, 3}, {0, 1, 2, 3, 4, 5});
  const Array slice = array.slice(1, 1, 3);
  CHECK(slice.shape == Shape{2, 2});
  CHECK(slice.data == array.data + 4);
  CHECK(slice.owner.get() == array.owner.get());
  CHECK(values(slice) == Values{1, 2, 4, 5});
  CHECK(values(slice.slice(0, 1, 2)) == Values{4, 5});
  CHECK(array.slice(1, 2, 2).num_elements() == 0);
}

TEST_CASE("a copy follows any strides") {
  Array array = make_array({2, 3}, {0, 1, 2, 3, 4, 5});
  SUBCASE("transposed") {
    std::swap(array.shape[0], array.shape[1]);
    std::swap(array.strides[0], array.strides[1]);
    CHECK(values(array) == Values{0, 3, 1, 4, 2, 5});
  }
  SUBCASE("backwards") {
    array.data += 5 * 4;
    array.strides = {-3, -1};
    CHECK(values(array) == Values{5, 4, 3, 2, 1, 0});
  }
  SUBCASE("broadcast") {
    array.strides = {0, 1};
    CHECK(values(array) == Values{0, 1, 2, 0, 1, 2});
  }
  SUBCASE("no dimensions") {
    array.shape = array.strides = {};
    CHECK(values(array) == Values{0});
  }
  SUBCASE("no elements") {
    array.shape = {0, 3};
    CHECK(values(array).empty());
  }
}

TEST_CASE("a copy moves elements of every size") {
  for (const std::uint8_t bits : {8, 16, 32, 64, 128}) {
    const std::size_t size = bits / 8;
    std::vector<char> source(6 * size), target(3 * size);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i);
    const DType dtype{kUInt, bits, 1};
    copy({dtype, {3}, {2}, source.data(), nullptr}, {dtype, {3}, {1}, target.data(), nullptr});
    for (std::size_t i = 0; i < target.size(); ++i) {
      CHECK(target[i] == source[i / size * 2 * size + i % size]);
    }
  }
}

TEST_CASE("a copy past the caches is a copy") {
  for (const std::int64_t size : {1, 15, 16, 17, 33, 100}) {
    for (const std::int64_t begin : {0, 1, 7, 16}) {
      Values numbers(256);
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
      const Array source = make_array({2, 128}, numbers);
      const Array target = make_array({2, 128}, Values(256, -1));
      copy(source.slice(1, 3, 3 + size), target.slice(1, begin, begin + size), true);
      CHECK(values(target.slice(1, begin, begin + size)) == values(source.slice(1, 3, 3 + size)));
      for (const std::int32_t value : values(target.slice(1, begin + size, 128)))
        CHECK(value == -1);
      for (const std::int32_t value : values(target.slice(1, 0, begin))) CHECK(value == -1);
    }
  }
}

TEST_CASE("elements of an odd size are copied one by one") {
  std::vector<char> source{0, 1, 2, 3, 4, 5, 6, 7, 8}, target(6);
  const DType dtype{kUInt, 8, 3};
  copy({dtype, {2}, {2}, source.data(), nullptr}, {dtype, {2}, {1}, target.data(), nullptr});
  CHECK(target == std::vector<char>{0, 1, 2, 6, 7, 8});
}

}  // namespace torchbeast
