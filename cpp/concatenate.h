// Assembles batches: copies rows of several nests side by side into memory of the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"

namespace torchbeast {

// Rows [begin, end) of a nest.
struct Rows {
  const ArrayNest* nest;
  std::int64_t begin;
  std::int64_t end;
};

// Memory of the pool for an array like this one, but with num_rows in dimension dim.
Array allocate_like(const Array& array, std::int64_t dim, std::int64_t num_rows, BufferPool& pool);

// The same nest; leaves with gaps, or with elements that share memory, are replaced by copies.
ArrayNest without_gaps(ArrayNest nest, BufferPool& pool);

// Concatenates the parts along dim, leaf by leaf; throws as check_fits() if they do not fit.
ArrayNest concatenate(const std::vector<Rows>& parts, std::int64_t dim, BufferPool& pool);

}  // namespace torchbeast
