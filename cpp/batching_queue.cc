#include "batching_queue.h"

#include <memory>
#include <utility>

#include "concatenate.h"

namespace torchbeast {

void BatchingQueue::enqueue(ArrayNest nest, const Poll& poll) {
  push(std::move(nest), 0, false, poll, nullptr, {});
}

void BatchingQueue::give(ArrayNest nest, const Poll& poll, std::int64_t client, Member* member,
                         Clock::duration patience) {
  push(std::move(nest), client, true, poll, member, patience);
}

void BatchingQueue::push(ArrayNest nest, std::int64_t client, bool given, const Poll& poll,
                         Member* member, Clock::duration patience) {
  const std::int64_t num_rows = count_rows(nest, queue_.batch_dim());
  queue_.push(std::make_shared<Item>(Item{std::move(nest), num_rows, client, given}), poll, member,
              patience);
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Poll& poll) {
  auto pieces = queue_.pop(poll);
  if (pieces.empty()) return {};
  Item& first = *pieces.front().item;
  const bool whole = pieces.size() == 1 && pieces[0].end - pieces[0].begin == first.num_rows;
  if (whole && first.given) return without_gaps(std::move(first.nest), pool_);
  return concatenate(queue_.rows_of(pieces), queue_.batch_dim(), pool_);
}

}  // namespace torchbeast
