// Lets many actors share one forward pass: each computes on its own rows and waits, a consumer gets
// the rows of several as one Batch and answers them all at once.
//
// actors -> compute() -> rows waiting -> Batch: inputs -> model -> set_outputs() -> compute()
// returns
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"
#include "request.h"
#include "row_queue.h"

namespace torchbeast {

// The rows of some requests, to be answered once. Dropped unanswered, its callers get AsyncError.
class Batch {
 public:
  using Piece = RowQueue<Request>::Piece;

  Batch(std::vector<Piece> pieces, ArrayNest inputs, std::int64_t batch_dim);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const ArrayNest& inputs() const { return inputs_; }

  // Throws std::invalid_argument for outputs of wrong shape (the right ones may still follow) and
  // std::runtime_error for an answer too many.
  void set_outputs(ArrayNest outputs);

  // The callers throw this instead.
  void set_exception(const Throw& error);

 private:
  std::vector<Piece> claim();  // The requests to answer; only one caller ever gets them.
  void check(const Array& output) const;

  std::mutex mutex_;
  std::vector<Piece> pieces_;  // Empty: answered.
  ArrayNest inputs_;
  std::int64_t batch_dim_;
  std::int64_t num_rows_;
};

// All methods may be called from any thread.
class DynamicBatcher {
 public:
  explicit DynamicBatcher(const QueueOptions& options) : queue_(options) {}

  // Waits for the outputs of its rows. Throws ClosedBatchingQueue when the batcher is closed
  // meanwhile, AsyncError when the batch was dropped, or what the consumer set instead. The inputs
  // have been copied when it returns; `meanwhile` is called once they wait to be. Clients that wait
  // have equal shares of a batch.
  ArrayNest compute(ArrayNest inputs, const Poll& poll = {},
                    const std::function<void()>& meanwhile = {}, std::int64_t client = 0);

  // The next batch; null once the batcher is closed.
  std::unique_ptr<Batch> get_batch(const Poll& poll = {});

  std::int64_t size() const { return queue_.num_rows(); }
  void close();
  bool is_closed() const { return queue_.is_closed(); }

 private:
  class Computing;

  RowQueue<Request> queue_;
  BufferPool pool_;
  std::mutex mutex_;
  std::unordered_set<Request*> computing_;  // In the queue or in a batch: close() answers them.
};

}  // namespace torchbeast
