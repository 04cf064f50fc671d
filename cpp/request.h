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

class Request {
 public:
  Request(ArrayNest inputs, std::int64_t rows, std::int64_t whose)
      : nest(std::move(inputs)), num_rows(rows), client(whose) {}

  const ArrayNest nest;
  const std::int64_t num_rows;
  const std::int64_t client;

  // Outputs for num_rows rows of this request, from first_row on; they are those of the batch from
  // batch_row on. Called once for each part.
  void set_outputs(std::shared_ptr<const ArrayNest> outputs, std::int64_t batch_row,
                   std::int64_t first_row, std::int64_t num_rows);

  // The first answer counts: later ones change nothing.
  void set_exception(Throw error);

  // Waits for the answer. The outputs are a slice of the batch's, copied only if there are several.
  ArrayNest get(std::int64_t batch_dim, BufferPool& pool, const Poll& poll);

 private:
  struct Part {
    std::shared_ptr<const ArrayNest> outputs;
    std::int64_t batch_row;
    std::int64_t first_row;
    std::int64_t num_rows;
  };

  std::mutex mutex_;
  Condition answered_;
  std::vector<Part> parts_;
  std::int64_t num_rows_answered_ = 0;
  Throw error_;
};

}  // namespace torchbeast
