#include "buffer_pool.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

namespace torchbeast {
namespace {

constexpr std::align_val_t kAlignment{64};  // A cache line; what PyTorch's own allocator gives.

// Below this the system's allocator is as fast and keeps its pages by itself.
constexpr std::size_t kSmallestPooled = 16 * 1024;

// Four sizes for each power of two: batches of a varying number of rows share buffers, and at most
// a quarter of a buffer lies unused.
std::size_t round_up(std::size_t num_bytes) {
  std::size_t power = kSmallestPooled;
  while (power * 2 <= num_bytes) power *= 2;
  const std::size_t step = power / 4;
  return (num_bytes + step - 1) / step * step;
}

void* acquire(std::size_t num_bytes) { return ::operator new(num_bytes, kAlignment); }
void release(void* memory) { ::operator delete(memory, kAlignment); }

}  // namespace

class BufferPool::Shelves {
 public:
  explicit Shelves(std::size_t max_idle_bytes) : max_idle_bytes_(max_idle_bytes) {}

  ~Shelves() {
    for (auto& [size, shelf] : shelves_) {
      for (void* memory : shelf) release(memory);
    }
  }

  void* take(std::size_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& shelf = shelves_[size];
      if (!shelf.empty()) {
        void* memory = shelf.back();  // The last one back is the likeliest to be in the cache.
        shelf.pop_back();
        idle_bytes_ -= size;
        return memory;
      }
    }
    return acquire(size);
  }

  void give_back(void* memory, std::size_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (idle_bytes_ + size <= max_idle_bytes_) {
        shelves_[size].push_back(memory);
        idle_bytes_ += size;
        return;
      }
    }
    release(memory);
  }

  std::size_t idle_bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return idle_bytes_;
  }

 private:
  const std::size_t max_idle_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::size_t, std::vector<void*>> shelves_;
  std::size_t idle_bytes_ = 0;
};

BufferPool::BufferPool(std::size_t max_idle_bytes)
    : shelves_(std::make_shared<Shelves>(max_idle_bytes)) {}

std::shared_ptr<void> BufferPool::allocate(std::size_t num_bytes) {
  if (num_bytes < kSmallestPooled) {
    return {acquire(std::max<std::size_t>(num_bytes, 1)), release};
  }
  const std::size_t size = round_up(num_bytes);
  return {shelves_->take(size),
          [shelves = shelves_, size](void* memory) { shelves->give_back(memory, size); }};
}

std::size_t BufferPool::idle_bytes() const { return shelves_->idle_bytes(); }

}  // namespace torchbeast
