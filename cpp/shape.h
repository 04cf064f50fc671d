// The sizes of an array's dimensions, or its strides. A few numbers are stored in the object
// itself: nests of arrays are sliced and copied at every step, and allocating memory would take
// most of that time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace torchbeast {

class Shape {
 public:
  Shape() = default;
  explicit Shape(std::size_t size) : size_(size), many_(size > kFew ? size : 0) {}  // All are 0.
  Shape(std::initializer_list<std::int64_t> numbers) { assign(numbers.begin(), numbers.end()); }

  void assign(const std::int64_t* begin, const std::int64_t* end) {
    *this = Shape(static_cast<std::size_t>(end - begin));
    std::copy(begin, end, data());
  }

  std::size_t size() const { return size_; }
  std::int64_t* data() { return size_ > kFew ? many_.data() : few_.data(); }
  const std::int64_t* data() const { return size_ > kFew ? many_.data() : few_.data(); }
  std::int64_t& operator[](std::size_t i) { return data()[i]; }
  std::int64_t operator[](std::size_t i) const { return data()[i]; }
  const std::int64_t* begin() const { return data(); }
  const std::int64_t* end() const { return data() + size_; }
  std::int64_t back() const { return data()[size_ - 1]; }

  bool operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }

 private:
  static constexpr std::size_t kFew = 6;  // [T, B] and an observation of up to four.

  std::size_t size_ = 0;
  std::array<std::int64_t, kFew> few_{};
  std::vector<std::int64_t> many_;  // Used instead if there are more.
};

}  // namespace torchbeast
