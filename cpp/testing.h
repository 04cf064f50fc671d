// Helpers of the C++ tests: small arrays of int32 that own their memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "array_nest.h"

namespace torchbeast {

inline Array make_array(const Shape& shape, const std::vector<std::int32_t>& values) {
  auto memory = std::make_shared<std::vector<std::int32_t>>(values);
  Array array;
  array.dtype = {kInt, 32, 1};
  array.shape = shape;
  array.strides = contiguous_strides(shape);
  array.data = reinterpret_cast<char*>(memory->data());
  array.owner = std::move(memory);
  return array;
}

// All elements in logical order.
inline std::vector<std::int32_t> values(const Array& array) {
  std::vector<std::int32_t> result(static_cast<std::size_t>(array.num_elements()));
  Array target = array;
  target.strides = contiguous_strides(array.shape);
  target.data = reinterpret_cast<char*>(result.data());
  copy(array, target);
  return result;
}

// A nest that is just one leaf, [1, values].
inline ArrayNest make_leaf(const std::vector<std::int32_t>& values) {
  auto structure = std::make_shared<Structure>();
  structure->add_leaf();
  return {structure, {make_array({1, static_cast<std::int64_t>(values.size())}, values)}};
}

inline std::vector<std::int32_t> values(const ArrayNest& nest) { return values(nest.leaves[0]); }

}  // namespace torchbeast
