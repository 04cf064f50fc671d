// One call of DynamicBatcher::compute(): rows on their way in, outputs on their way back, in as
// many parts as the batches that the rows were split over.
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

// Throws the exception that it stands for. Each caller gets one of its own: an object shared
// between threads would have to be guarded against those who change it while they handle it.
using Throw = std::function<void()>;

// Called with the answer as soon as it is there, by whoever gave it, or with null if there is an
// exception instead. May throw, which becomes the exception. Not to wait: a lock is held.
using OnAnswer = std::function<void(const ArrayNest* answer)>;

class Request {
 public:
  Request(ArrayNest inputs, std::int64_t rows, std::int64_t whose, OnAnswer on_answer = {})
      : nest(std::move(inputs)), num_rows(rows), client(whose), on_answer_(std::move(on_answer)) {}

  const ArrayNest nest;
  const std::int64_t num_rows;
  const std::int64_t client;

  // Outputs for num_rows rows of this request, from first_row on; they are those of the batch from
  // batch_row on. Called once for each part.
  // The answer is a slice of the batch's, copied only if there are several.
  void set_outputs(std::shared_ptr<const ArrayNest> outputs, std::int64_t batch_row,
                   std::int64_t first_row, std::int64_t num_rows, std::int64_t batch_dim,
                   BufferPool& pool);

  // The first answer counts: later ones change nothing.
  void set_exception(Throw error);

  // Waits for the answer, which can be had once, or throws what was set instead.
  ArrayNest get(const Poll& poll);

  // Until get() would not.
  void wait(const Poll& poll);

  // When the answer came.
  Clock::time_point answered_at() const;

  // Nobody is called with the answer from now on.
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
