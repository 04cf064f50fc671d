// Reusable memory for batches: touching fresh pages is most of the cost of a large batch.
//
// allocate() -> owner in an Array -> a tensor in Python -> its deleter, in any thread -> back here
#pragma once

#include <cstddef>
#include <memory>

namespace torchbeast {

class BufferPool {
 public:
  // Idle memory beyond max_idle_bytes goes back to the system.
  explicit BufferPool(std::size_t max_idle_bytes = std::size_t{1} << 30);

  // At least num_bytes, aligned for any use. The memory returns to the pool when the last reference
  // is dropped, in any thread, and also if the BufferPool itself has been destroyed.
  std::shared_ptr<void> allocate(std::size_t num_bytes);

  std::size_t idle_bytes() const;

 private:
  class Shelves;
  std::shared_ptr<Shelves> shelves_;
};

}  // namespace torchbeast
