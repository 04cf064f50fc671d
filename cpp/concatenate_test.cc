#include "concatenate.h"

#include <doctest/doctest.h>

#include <stdexcept>

#include "testing.h"

namespace torchbeast {

using Values = std::vector<std::int32_t>;

TEST_CASE("rows come side by side along any dimension") {
  BufferPool pool;
  auto structure = std::make_shared<Structure>();
  structure->add_leaf();
  const ArrayNest a{structure, {make_array({2, 2}, {0, 1, 2, 3})}};
  const ArrayNest b{structure, {make_array({2, 2}, {4, 5, 6, 7})}};

  const ArrayNest columns = concatenate({{&a, 0, 2}, {&b, 0, 2}}, 1, pool);
  CHECK(columns.leaves[0].shape == Shape{2, 4});
  CHECK(values(columns) == Values{0, 1, 4, 5, 2, 3, 6, 7});
  CHECK(values(concatenate({{&a, 0, 2}, {&b, 0, 2}}, 0, pool)) == Values{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(values(concatenate({{&a, 1, 2}, {&b, 0, 1}}, 1, pool)) == Values{1, 4, 3, 6});
}

TEST_CASE("a batch never shares memory with what it was made of") {
  BufferPool pool;
  const ArrayNest nest = make_leaf({1, 2});
  CHECK(concatenate({{&nest, 0, 2}}, 1, pool).leaves[0].data != nest.leaves[0].data);
}

TEST_CASE("nests that don't fit are refused") {
  BufferPool pool;
  const ArrayNest a = make_leaf({1, 2});
  ArrayNest b = make_leaf({1, 2});
  b.leaves[0].dtype = {kFloat, 32, 1};
  CHECK_THROWS_AS(concatenate({{&a, 0, 2}, {&b, 0, 2}}, 1, pool), std::invalid_argument);
}

}  // namespace torchbeast
