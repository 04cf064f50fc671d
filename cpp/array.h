// An n-dimensional array in host memory: what moves through the queues.
//
// An Array does not own its elements, it keeps their owner alive: a tensor of PyTorch, a NumPy
// array, or a buffer of the pool. Copying an Array or taking a slice copies no element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shape.h"

namespace torchbeast {

// Codes of DLPack for the kinds of elements that NumPy shares.
constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kComplex = 5, kBool = 6;

// The type of an element as DLPack names it; {2, 32, 1} is float32. The core only moves elements
// (except in cast.h), so every type that DLPack can name is valid.
struct DType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;

  std::size_t itemsize() const { return (std::size_t{bits} * lanes + 7) / 8; }
  std::string name() const;

  bool operator==(const DType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
  bool operator!=(const DType& other) const { return !(*this == other); }
};

std::string to_string(const Shape& shape);  // "[81, 32, 4, 84, 84]"

struct Array {
  DType dtype{};
  Shape shape;
  Shape strides;  // In elements, as in DLPack.
  char* data = nullptr;
  std::shared_ptr<const void> owner;

  std::int64_t ndim() const { return static_cast<std::int64_t>(shape.size()); }
  std::int64_t num_elements() const;
  std::size_t num_bytes() const;

  // Rows begin to end of dimension dim, sharing memory and owner.
  Array slice(std::int64_t dim, std::int64_t begin, std::int64_t end) const;
};

// Strides, in elements, of an array without gaps in C order.
Shape contiguous_strides(const Shape& shape);

// Copies all elements; both arrays must have the same dtype and shape. With past_caches, long runs
// are written to memory directly (stream_copy.h).
void copy(const Array& source, const Array& target, bool past_caches = false);

}  // namespace torchbeast
