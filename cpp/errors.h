// The exceptions of the core that callers distinguish; each has a Python class in the bindings.
#pragma once

#include <stdexcept>

namespace torchbeast {

// The queue was closed: the regular end of the threads that use it.
struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The batch was dropped without outputs, so there will be no answer.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Two nests that should have the same structure do not.
struct NestError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace torchbeast
