// Lets many actors share one forward pass: each hands in its own rows; a consumer gets the rows of
// several actors as one Batch and answers them all at once.
//
// actors -> call() -> rows waiting -> Batch: inputs -> model -> set_outputs() -> on_answer(), get()
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"
#include "request.h"
#include "row_queue.h"

namespace torchbeast {

// The rows of some requests, to be answered once. If it is destroyed without an answer, the callers
// get AsyncError.
class Batch {
 public:
  using Piece = RowQueue<Request>::Piece;

  // The pool's memory is for the answers to requests that were split over several batches.
  Batch(std::vector<Piece> pieces, ArrayNest inputs, std::int64_t batch_dim, BufferPool pool);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const ArrayNest& inputs() const { return inputs_; }

  // Throws std::invalid_argument for outputs of a wrong shape (right ones may still be set) and
  // std::runtime_error if the batch has been answered already.
  void set_outputs(ArrayNest outputs);

  // Makes the callers throw this error.
  void set_exception(const Throw& error);

 private:
  std::vector<Piece> claim();  // Returns the requests to answer, but only to its first caller.
  void check(const Array& output) const;

  std::mutex mutex_;
  std::vector<Piece> pieces_;  // Empty: answered.
  ArrayNest inputs_;
  std::int64_t batch_dim_;
  BufferPool pool_;
  std::int64_t num_rows_;
};

// All methods may be called from any thread.
class DynamicBatcher {
 public:
  explicit DynamicBatcher(const QueueOptions& options) : queue_(options) {}

  // A request in progress. Once it is destroyed, on_answer is not called any more.
  class Call {
   public:
    Call(DynamicBatcher& batcher, std::shared_ptr<Request> request);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Waits for the outputs of its rows; may be called once. Throws ClosedBatchingQueue if the
    // batcher is closed meanwhile, AsyncError if the batch was dropped, or the exception that the
    // consumer has set. When it returns, the inputs have been copied.
    ArrayNest get(const Poll& poll = {}) { return request_->get(poll); }
    void wait(const Poll& poll) const { request_->wait(poll); }
    Clock::time_point answered_at() const { return request_->answered_at(); }

   private:
    DynamicBatcher& batcher_;
    const std::shared_ptr<Request> request_;
  };

  // Hands rows in without waiting for their outputs. Clients with rows waiting have equal shares of
  // a batch.
  std::unique_ptr<Call> call(ArrayNest inputs, const Poll& poll = {}, OnAnswer on_answer = {},
                             std::int64_t client = 0);

  // Hands rows in and waits for their outputs.
  ArrayNest compute(ArrayNest inputs, const Poll& poll = {}) {
    return call(std::move(inputs), poll)->get(poll);
  }

  // Waits for the next batch; returns null once the batcher is closed.
  std::unique_ptr<Batch> get_batch(const Poll& poll = {});

  std::int64_t size() const { return queue_.num_rows(); }
  void close();
  bool is_closed() const { return queue_.is_closed(); }

 private:
  RowQueue<Request> queue_;
  BufferPool pool_;
  std::mutex mutex_;
  std::unordered_set<Request*> called_;  // In the queue or in a batch: close() answers them.
};

}  // namespace torchbeast
