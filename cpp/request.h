// One call of DynamicBatcher: its rows, and their outputs, which come in as many parts as there are
// batches that the rows were split over.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"
#include "waiting.h"

namespace torchbeast {

// Throws an exception. Each caller gets an object of its own: a handler may change its exception
// while another thread handles the same error.
using Throw = std::function<void()>;

// Called with the answer as soon as it is complete, in the thread that gave it, or with null if
// there is an exception instead. What it throws becomes the exception. It must not wait, because a
// lock is held.
using OnAnswer = std::function<void(const ArrayNest* answer)>;

class Request {
 public:
  Request(ArrayNest inputs, std::int64_t rows, std::int64_t whose, OnAnswer on_answer = {})
      : nest(std::move(inputs)), num_rows(rows), client(whose), on_answer_(std::move(on_answer)) {}

  const ArrayNest nest;
  const std::int64_t num_rows;
  const std::int64_t client;

  // Sets the outputs for num_rows rows of this request, from first_row on: they are the rows of
  // `outputs`, those of a whole batch, from batch_row on. Called once for each part. With a single
  // part, the answer is a slice of `outputs`; several parts are copied.
  void set_outputs(std::shared_ptr<const ArrayNest> outputs, std::int64_t batch_row,
                   std::int64_t first_row, std::int64_t num_rows, std::int64_t batch_dim,
                   BufferPool& pool);

  // Answers with an exception. Does nothing if there is an answer already.
  void set_exception(Throw error);

  // Waits for the answer and returns it, or throws the exception. May be called once.
  ArrayNest get(const Poll& poll);

  // Waits until there is an answer or an exception.
  void wait(const Poll& poll);

  // When the answer came.
  Clock::time_point answered_at() const;

  // From now on, on_answer is not called.
  void forget();

 private:
  struct Part {
    std::shared_ptr<const ArrayNest> outputs;
    std::int64_t batch_row;
    std::int64_t first_row;
    std::int64_t num_rows;
  };

  void answer(std::int64_t batch_dim, BufferPool& pool);
  ArrayNest assemble(std::int64_t batch_dim, BufferPool& pool);

  mutable std::mutex mutex_;
  Condition answered_;
  OnAnswer on_answer_;
  std::vector<Part> parts_;
  std::int64_t num_rows_answered_ = 0;
  bool is_answered_ = false;
  Clock::time_point answered_at_;
  ArrayNest answer_;
  Throw error_;
};

}  // namespace torchbeast
