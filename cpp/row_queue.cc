#include "row_queue.h"

namespace torchbeast {

void QueueOptions::check() const {
  const auto require = [](bool rule, const std::string& message) {
    if (!rule) throw std::invalid_argument(message);
  };
  const auto got = [](std::int64_t value) { return ", got " + std::to_string(value); };
  require(batch_dim >= 0, "batch_dim must be >= 0" + got(batch_dim));
  require(minimum_batch_size >= 1, "Min batch size must be >= 1" + got(minimum_batch_size));
  require(maximum_batch_size >= minimum_batch_size, "Max batch size must be >= min batch size" +
                                                        got(maximum_batch_size) + " < " +
                                                        std::to_string(minimum_batch_size));
  require(
      !timeout_ms || *timeout_ms >= 0,
      "timeout_ms must be >= 0, or None to wait for whole batches" + got(timeout_ms.value_or(0)));
  require(maximum_queue_size.value_or(0) == 0 || *maximum_queue_size >= maximum_batch_size,
          "Max queue size must be >= max batch size, or 0" + got(maximum_queue_size.value_or(0)) +
              " < " + std::to_string(maximum_batch_size));
}

std::int64_t count_rows(const ArrayNest& nest, std::int64_t batch_dim) {
  if (nest.leaves.empty()) {
    throw std::invalid_argument("Cannot enqueue empty vector of tensors, got " +
                                nest.structure->describe());
  }
  std::int64_t num_rows = -1;
  for (const Array& leaf : nest.leaves) {
    if (leaf.ndim() <= batch_dim) {
      throw std::invalid_argument(
          "Enqueued tensors must have more than batch_dim == " + std::to_string(batch_dim) +
          " dimensions, got shape " + to_string(leaf.shape));
    }
    const std::int64_t rows = leaf.shape[static_cast<std::size_t>(batch_dim)];
    if (rows == 0 || (num_rows != -1 && rows != num_rows)) {
      throw std::invalid_argument(
          "Enqueued tensors must have the same size, at least 1, in batch dimension " +
          std::to_string(batch_dim) + ", got shape " + to_string(leaf.shape) +
          (num_rows == -1 ? "" : " beside " + to_string(nest.leaves.front().shape)));
    }
    num_rows = rows;
  }
  return num_rows;
}

}  // namespace torchbeast
