#include "request.h"

#include <algorithm>
#include <utility>

#include "concatenate.h"

namespace torchbeast {

void Request::set_outputs(std::shared_ptr<const ArrayNest> outputs, std::int64_t batch_row,
                          std::int64_t first_row, std::int64_t num_rows_in_part) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_.push_back({std::move(outputs), batch_row, first_row, num_rows_in_part});
    num_rows_answered_ += num_rows_in_part;
    if (num_rows_answered_ != num_rows) return;
  }
  answered_.notify_one();
}

void Request::set_exception(Throw error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ || num_rows_answered_ == num_rows) return;
    error_ = std::move(error);
  }
  answered_.notify_one();
}

ArrayNest Request::get(std::int64_t batch_dim, BufferPool& pool, const Poll& poll) {
  std::vector<Part> parts;
  Throw error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wait(answered_, lock, {}, poll, [this] { return error_ || num_rows_answered_ == num_rows; });
    parts.swap(parts_);
    error = error_;
  }
  if (error) error();
  if (parts.size() == 1) {
    const Part& part = parts.front();
    return part.outputs->slice(batch_dim, part.batch_row, part.batch_row + part.num_rows);
  }
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.first_row < b.first_row; });
  std::vector<Rows> rows;
  for (const Part& part : parts) {
    rows.push_back({part.outputs.get(), part.batch_row, part.batch_row + part.num_rows});
  }
  return concatenate(rows, batch_dim, pool);
}

}  // namespace torchbeast
