#include "concatenate.h"

#include <cassert>
#include <utility>

namespace torchbeast {
namespace {

// A batch of this size has left the caches before it is read.
constexpr std::size_t kLargeBatch = std::size_t{16} << 20;

}  // namespace

Array allocate_like(const Array& array, std::int64_t dim, std::int64_t num_rows, BufferPool& pool) {
  Array result;
  result.dtype = array.dtype;
  result.shape = array.shape;
  result.shape[static_cast<std::size_t>(dim)] = num_rows;
  result.strides = contiguous_strides(result.shape);
  std::shared_ptr<void> memory = pool.allocate(result.num_bytes());
  result.data = static_cast<char*>(memory.get());
  result.owner = std::move(memory);
  return result;
}

ArrayNest without_gaps(ArrayNest nest, BufferPool& pool) {
  for (Array& leaf : nest.leaves) {
    if (leaf.ndim() == 0 || leaf.strides == contiguous_strides(leaf.shape)) continue;
    Array copied = allocate_like(leaf, 0, leaf.shape[0], pool);
    copy(leaf, copied);
    leaf = std::move(copied);
  }
  return nest;
}

ArrayNest concatenate(const std::vector<Rows>& parts, std::int64_t dim, BufferPool& pool) {
  assert(!parts.empty());
  const ArrayNest& first = *parts.front().nest;
  std::int64_t num_rows = 0;
  for (const Rows& part : parts) {
    if (part.nest != &first) check_fits(*part.nest, first, dim);
    num_rows += part.end - part.begin;
  }

  ArrayNest result{first.structure, {}};
  result.leaves.reserve(first.leaves.size());
  for (std::size_t i = 0; i < first.leaves.size(); ++i) {
    Array batch = allocate_like(first.leaves[i], dim, num_rows, pool);
    const bool past_caches = batch.num_bytes() >= kLargeBatch;
    std::int64_t row = 0;
    for (const Rows& part : parts) {
      const std::int64_t end = row + part.end - part.begin;
      copy(part.nest->leaves[i].slice(dim, part.begin, part.end), batch.slice(dim, row, end),
           past_caches);
      row = end;
    }
    result.leaves.push_back(std::move(batch));
  }
  return result;
}

}  // namespace torchbeast
