// Helpers of the C++ tests: small arrays that own their memory, int32 by default, and nests of
// them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array_nest.h"

namespace torchbeast {

template <typename T>
Array make_array_of(DType dtype, const Shape& shape, const std::vector<T>& values) {
  auto memory = std::make_shared<std::vector<T>>(values);
  Array array;
  array.dtype = dtype;
  array.shape = shape;
  array.strides = contiguous_strides(shape);
  array.data = reinterpret_cast<char*>(memory->data());
  array.owner = std::move(memory);
  return array;
}

inline Array make_array(const Shape& shape, const std::vector<std::int32_t>& values) {
  return make_array_of<std::int32_t>({kInt, 32, 1}, shape, values);
}

// All elements in logical order.
template <typename T>
std::vector<T> values_of(const Array& array) {
  std::vector<T> result(static_cast<std::size_t>(array.num_elements()));
  Array target = array;
  target.strides = contiguous_strides(array.shape);
  target.data = reinterpret_cast<char*>(result.data());
  copy(array, target);
  return result;
}

inline std::vector<std::int32_t> values(const Array& array) {
  return values_of<std::int32_t>(array);
}

inline ArrayNest leaf_of(Array array) {
  auto structure = std::make_shared<Structure>();
  structure->add_leaf();
  return {structure, {std::move(array)}};
}

inline ArrayNest tuple_of(const std::vector<Array>& leaves) {
  std::vector<ArrayNest> nests;
  for (const Array& leaf : leaves) nests.push_back(leaf_of(leaf));
  return tuple_of_nests(nests);
}

inline ArrayNest dict_of(const std::map<std::string, ArrayNest>& items) {
  std::vector<std::string> keys;
  for (const auto& item : items) keys.push_back(item.first);
  auto structure = std::make_shared<Structure>();
  structure->add_dict(keys);
  ArrayNest result{structure, {}};
  for (const auto& item : items) {
    structure->add(*item.second.structure);
    result.leaves.insert(result.leaves.end(), item.second.leaves.begin(), item.second.leaves.end());
  }
  return result;
}

// A nest that is just one leaf, [1, values].
inline ArrayNest make_leaf(const std::vector<std::int32_t>& values) {
  return leaf_of(make_array({1, static_cast<std::int64_t>(values.size())}, values));
}

inline std::vector<std::int32_t> values(const ArrayNest& nest) { return values(nest.leaves[0]); }

}  // namespace torchbeast
