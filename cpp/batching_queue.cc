#include "batching_queue.h"

#include <memory>
#include <utility>

#include "concatenate.h"

namespace torchbeast {

void BatchingQueue::enqueue(ArrayNest nest, const Poll& poll) {
  const std::int64_t num_rows = count_rows(nest, queue_.options().batch_dim);
  queue_.push(std::make_shared<Item>(Item{std::move(nest), num_rows}), poll);
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Poll& poll) {
  const auto pieces = queue_.pop(poll);
  if (pieces.empty()) return {};
  return concatenate(queue_.rows_of(pieces), queue_.options().batch_dim, pool_);
}

}  // namespace torchbeast
