// The queue under BatchingQueue and DynamicBatcher: items of any number of rows go in, batches of
// bounded size come out, first in, first out.
//
//   push(a, 3 rows), push(b, 2 rows)  ->  pop(): all of a, row 0 of b    (with a maximum of 4)
//                                         pop(): row 1 of b
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "array_nest.h"
#include "concatenate.h"
#include "errors.h"
#include "waiting.h"

namespace torchbeast {

// All sizes count rows.
struct QueueOptions {
  std::int64_t batch_dim = 1;
  std::int64_t minimum_batch_size = 1;
  std::int64_t maximum_batch_size = 1024;
  std::optional<std::int64_t> timeout_ms;          // None: waits for the minimum, however long.
  std::optional<std::int64_t> maximum_queue_size;  // None: no bound.

  void check() const;  // Throws std::invalid_argument.
};

// Rows of a nest along batch_dim; throws std::invalid_argument if its leaves can't be batched.
std::int64_t count_rows(const ArrayNest& nest, std::int64_t batch_dim);

// Item has at least the members `ArrayNest nest` and `std::int64_t num_rows`.
template <typename Item>
class RowQueue {
 public:
  // Rows begin to end of an item.
  struct Piece {
    std::shared_ptr<Item> item;
    std::int64_t begin;
    std::int64_t end;
  };

  static std::vector<Rows> rows_of(const std::vector<Piece>& pieces) {
    std::vector<Rows> rows;
    rows.reserve(pieces.size());
    for (const Piece& piece : pieces) rows.push_back({&piece.item->nest, piece.begin, piece.end});
    return rows;
  }

  explicit RowQueue(const QueueOptions& options) : options_(options) { options_.check(); }

  // Waits while the queue is full. Throws when the item does not fit the one before it.
  void push(std::shared_ptr<Item> item, const Poll& poll) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wait(room_, lock, {}, poll, [this] { return closed_ || has_room(); });
      if (closed_) throw ClosedBatchingQueue("Enqueue to closed queue");
      try {
        check_fits_last(*item);
      } catch (...) {
        room_.notify_one();  // The room is for somebody else now.
        throw;
      }
      num_rows_ += item->num_rows;
      items_.push_back(std::move(item));
      if (has_room()) room_.notify_one();  // One wake-up a batch; each producer passes it on.
    }
    rows_.notify_one();
  }

  // Waits for a batch; the timeout runs from when there is something to wait with. Empty: closed.
  std::vector<Piece> pop(const Poll& poll) {
    std::unique_lock<std::mutex> lock(mutex_);
    do {
      wait(rows_, lock, {}, poll, [this] { return closed_ || num_rows_ > 0; });
      wait(rows_, lock, deadline(), poll,
           [this] { return closed_ || num_rows_ >= options_.minimum_batch_size; });
    } while (!closed_ && num_rows_ == 0);  // Another consumer was faster.
    std::vector<Piece> pieces = take(options_.maximum_batch_size);
    if (has_room()) room_.notify_one();
    if (num_rows_ > 0) rows_.notify_one();
    return pieces;
  }

  std::int64_t num_rows() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_rows_;
  }

  // Drops what waits in the queue and wakes everybody.
  void close() {
    std::deque<std::shared_ptr<Item>> dropped;  // Dies after the lock: owners may be slow to go.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("Queue was closed already");
    closed_ = true;
    num_rows_ = 0;
    items_.swap(dropped);
    room_.notify_all();
    rows_.notify_all();
  }

  bool is_closed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  const QueueOptions& options() const { return options_; }

 private:
  bool has_room() const {
    return !options_.maximum_queue_size || num_rows_ < *options_.maximum_queue_size;
  }

  std::optional<Clock::time_point> deadline() const {
    if (!options_.timeout_ms) return {};
    constexpr std::int64_t kDecades = 1'000'000'000'000;  // Keeps the sum within the clock's range.
    return Clock::now() + std::chrono::milliseconds(std::min(*options_.timeout_ms, kDecades));
  }

  // The producer at fault gets the error, not the consumer that would assemble the batch. Batches
  // of one row never mix items.
  void check_fits_last(const Item& item) const {
    if (items_.empty() || options_.maximum_batch_size == 1) return;
    check_fits(item.nest, items_.back()->nest, options_.batch_dim);
  }

  std::vector<Piece> take(std::int64_t maximum) {
    std::vector<Piece> pieces;
    while (maximum > 0 && !items_.empty()) {
      const std::int64_t begin = taken_of_first_;
      const std::int64_t end = std::min(items_.front()->num_rows, begin + maximum);
      pieces.push_back({items_.front(), begin, end});
      taken_of_first_ = end;
      if (end == items_.front()->num_rows) {
        items_.pop_front();
        taken_of_first_ = 0;
      }
      maximum -= end - begin;
      num_rows_ -= end - begin;
    }
    return pieces;
  }

  const QueueOptions options_;
  mutable std::mutex mutex_;
  Condition room_;  // For producers.
  Condition rows_;  // For consumers.
  std::deque<std::shared_ptr<Item>> items_;
  std::int64_t taken_of_first_ = 0;  // Rows of the first item that are in earlier batches.
  std::int64_t num_rows_ = 0;        // Rows that wait.
  bool closed_ = false;
};

}  // namespace torchbeast
