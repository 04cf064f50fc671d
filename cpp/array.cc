#include "array.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>
#include <vector>

#include "stream_copy.h"

namespace torchbeast {
namespace {

// One dimension of a copy, strides in bytes.
struct Loop {
  std::int64_t count;
  std::int64_t source_stride;
  std::int64_t target_stride;
};

// The loops of a copy, outermost first. Neighbouring dimensions without a gap between them are
// merged, so that a slice along the batch dimension is copied in few, long runs.
std::vector<Loop> plan(const Array& source, const Array& target) {
  const auto itemsize = static_cast<std::int64_t>(source.dtype.itemsize());
  std::vector<Loop> loops;
  for (std::size_t i = 0; i < source.shape.size(); ++i) {
    const Loop loop{source.shape[i], source.strides[i] * itemsize, target.strides[i] * itemsize};
    if (loop.count == 1) continue;
    if (!loops.empty() && loops.back().source_stride == loop.source_stride * loop.count &&
        loops.back().target_stride == loop.target_stride * loop.count) {
      loops.back() = {loops.back().count * loop.count, loop.source_stride, loop.target_stride};
    } else {
      loops.push_back(loop);
    }
  }
  return loops;
}

template <typename Element>
void copy_elements(const char* source, char* target, const Loop& loop) {
  for (std::int64_t i = 0; i < loop.count; ++i) {
    std::memcpy(target + i * loop.target_stride, source + i * loop.source_stride, sizeof(Element));
  }
}

// Runs the loops of one copy.
class Copier {
 public:
  Copier(std::vector<Loop> loops, std::size_t itemsize, bool past_caches)
      : loops_(std::move(loops)), itemsize_(itemsize), past_caches_(past_caches) {}

  void run(const char* source, char* target) const {
    if (loops_.empty()) {
      std::memcpy(target, source, itemsize_);
    } else {
      run_from(0, source, target);
    }
    if (past_caches_) stream_fence();
  }

 private:
  void run_from(std::size_t index, const char* source, char* target) const {
    const Loop& loop = loops_[index];
    if (index + 1 == loops_.size()) return run_innermost(loop, source, target);
    for (std::int64_t i = 0; i < loop.count; ++i) {
      run_from(index + 1, source + i * loop.source_stride, target + i * loop.target_stride);
    }
  }

  void run_innermost(const Loop& loop, const char* source, char* target) const {
    const auto step = static_cast<std::int64_t>(itemsize_);
    if (loop.source_stride == step && loop.target_stride == step) {
      const std::size_t num_bytes = static_cast<std::size_t>(loop.count) * itemsize_;
      if (past_caches_) return stream_copy(target, source, num_bytes);
      std::memcpy(target, source, num_bytes);
      return;
    }
    struct Pair {
      std::uint64_t low, high;
    };
    switch (itemsize_) {
      case 1: return copy_elements<std::uint8_t>(source, target, loop);
      case 2: return copy_elements<std::uint16_t>(source, target, loop);
      case 4: return copy_elements<std::uint32_t>(source, target, loop);
      case 8: return copy_elements<std::uint64_t>(source, target, loop);
      case 16: return copy_elements<Pair>(source, target, loop);
      default:
        for (std::int64_t i = 0; i < loop.count; ++i) {
          std::memcpy(target + i * loop.target_stride, source + i * loop.source_stride, itemsize_);
        }
    }
  }

  const std::vector<Loop> loops_;
  const std::size_t itemsize_;
  const bool past_caches_;
};

}  // namespace

std::string DType::name() const {
  // Indexed by DLPack's codes. From float8 on, the name includes the number of bits.
  static const char* const kNames[] = {"int",
                                       "uint",
                                       "float",
                                       "handle",
                                       "bfloat",
                                       "complex",
                                       "bool",
                                       "float8_e3m4",
                                       "float8_e4m3",
                                       "float8_e4m3b11fnuz",
                                       "float8_e4m3fn",
                                       "float8_e4m3fnuz",
                                       "float8_e5m2",
                                       "float8_e5m2fnuz",
                                       "float8_e8m0fnu",
                                       "float6_e2m3fn",
                                       "float6_e3m2fn",
                                       "float4_e2m1fn"};
  constexpr std::size_t kNumNames = sizeof(kNames) / sizeof(kNames[0]);
  std::string name = code < kNumNames ? kNames[code] : "code" + std::to_string(code) + "_";
  if (code < kBool || code >= kNumNames) name += std::to_string(bits);
  return lanes == 1 ? name : name + "_x" + std::to_string(lanes);
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::int64_t Array::num_elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::size_t Array::num_bytes() const {
  return static_cast<std::size_t>(num_elements()) * dtype.itemsize();
}

Array Array::slice(std::int64_t dim, std::int64_t begin, std::int64_t end) const {
  assert(0 <= dim && dim < ndim());
  const auto axis = static_cast<std::size_t>(dim);
  assert(0 <= begin && begin <= end && end <= shape[axis]);
  Array result = *this;
  result.shape[axis] = end - begin;
  result.data += begin * strides[axis] * static_cast<std::int64_t>(dtype.itemsize());
  return result;
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(shape[i], 1);
  }
  return strides;
}

void copy(const Array& source, const Array& target, bool past_caches) {
  assert(source.dtype == target.dtype && source.shape == target.shape);
  if (source.num_elements() == 0) return;
  Copier(plan(source, target), source.dtype.itemsize(), past_caches).run(source.data, target.data);
}

}  // namespace torchbeast
