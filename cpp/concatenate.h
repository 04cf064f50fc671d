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

// Leaf by leaf along dim; throws as check_fits() does when the nests don't fit together.
ArrayNest concatenate(const std::vector<Rows>& parts, std::int64_t dim, BufferPool& pool);

}  // namespace torchbeast
