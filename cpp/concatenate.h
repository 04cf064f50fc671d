// Assembles batches: rows of several nests, copied side by side into memory of the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"

namespace torchbeast {

// Rows begin to end of a nest.
struct Rows {
  const ArrayNest* nest;
  std::int64_t begin;
  std::int64_t end;
};

// Memory of the pool for an array like this one, but with num_rows in dimension dim.
Array allocate_like(const Array& array, std::int64_t dim, std::int64_t num_rows, BufferPool& pool);

// The same nest, with those leaves copied that have gaps or elements that share memory.
ArrayNest without_gaps(ArrayNest nest, BufferPool& pool);

// Leaf by leaf along dim; throws as check_fits() does when the nests don't fit together.
ArrayNest concatenate(const std::vector<Rows>& parts, std::int64_t dim, BufferPool& pool);

}  // namespace torchbeast
