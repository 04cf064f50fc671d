#include "request.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "concatenate.h"

namespace torchbeast {

void Request::set_outputs(std::shared_ptr<const ArrayNest> outputs, std::int64_t batch_row,
                          std::int64_t first_row, std::int64_t num_rows_in_part,
                          std::int64_t batch_dim, BufferPool& pool) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parts_.push_back({std::move(outputs), batch_row, first_row, num_rows_in_part});
    num_rows_answered_ += num_rows_in_part;
    if (is_answered_ || num_rows_answered_ != num_rows) return;
    answer(batch_dim, pool);
  }
  answered_.notify_one();
}

void Request::set_exception(Throw error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_answered_) return;
    is_answered_ = true;
    error_ = std::move(error);
    if (on_answer_) on_answer_(nullptr);
  }
  answered_.notify_one();
}

void Request::answer(std::int64_t batch_dim, BufferPool& pool) {
  is_answered_ = true;
  answered_at_ = Clock::now();
  try {
    answer_ = assemble(batch_dim, pool);
    if (on_answer_) on_answer_(&answer_);
  } catch (...) {
    error_ = [e = std::current_exception()] { std::rethrow_exception(e); };
    if (on_answer_) on_answer_(nullptr);
  }
}

ArrayNest Request::assemble(std::int64_t batch_dim, BufferPool& pool) {
  if (parts_.size() == 1) {
    const Part& part = parts_.front();
    return part.outputs->slice(batch_dim, part.batch_row, part.batch_row + part.num_rows);
  }
  std::sort(parts_.begin(), parts_.end(),
            [](const Part& a, const Part& b) { return a.first_row < b.first_row; });
  std::vector<Rows> rows;
  for (const Part& part : parts_) {
    rows.push_back({part.outputs.get(), part.batch_row, part.batch_row + part.num_rows});
  }
  return concatenate(rows, batch_dim, pool);
}

void Request::wait(const Poll& poll) {
  std::unique_lock<std::mutex> lock(mutex_);
  torchbeast::wait(answered_, lock, {}, poll, [this] { return is_answered_; });
}

ArrayNest Request::get(const Poll& poll) {
  wait(poll);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!error_) return std::move(answer_);
  const Throw error = error_;
  lock.unlock();
  error();
  return {};
}

Clock::time_point Request::answered_at() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return answered_at_;
}

void Request::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_answer_ = {};
}

}  // namespace torchbeast
