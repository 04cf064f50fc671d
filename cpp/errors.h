// The exceptions of the core that callers tell apart; the bindings give each its Python class.
#pragma once

#include <stdexcept>

namespace torchbeast {

// The queue was closed: a regular way for the threads around it to end.
struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Nobody will ever answer: the batch was dropped without outputs.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Two nests that should have the same structure do not.
struct NestError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace torchbeast
