#include "buffer_pool.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace torchbeast {

constexpr std::size_t kMegabyte = 1 << 20;

TEST_CASE("memory is used again once it is free, and not before") {
  BufferPool pool;
  auto first = pool.allocate(kMegabyte);
  void* const address = first.get();
  auto second = pool.allocate(kMegabyte);
  CHECK(second.get() != address);
  first.reset();
  CHECK(pool.idle_bytes() == kMegabyte);
  CHECK(pool.allocate(kMegabyte).get() == address);
}

TEST_CASE("batches of almost the same size share a buffer") {
  BufferPool pool;
  void* const address = pool.allocate(kMegabyte - 100).get();
  CHECK(pool.allocate(kMegabyte - 10'000).get() == address);
}

TEST_CASE("every size is there in full, and aligned") {
  BufferPool pool;
  for (std::size_t size = 0; size < 100'000; size = size * 5 / 4 + 1) {
    auto memory = pool.allocate(size);
    std::memset(memory.get(), 1, size);
    CHECK(reinterpret_cast<std::uintptr_t>(memory.get()) % 64 == 0);
  }
}

TEST_CASE("idle memory is bounded") {
  BufferPool pool(2 * kMegabyte);
  {
    std::vector<std::shared_ptr<void>> all{pool.allocate(kMegabyte), pool.allocate(kMegabyte),
                                           pool.allocate(kMegabyte)};
  }
  CHECK(pool.idle_bytes() == 2 * kMegabyte);
}

TEST_CASE("memory outlives the pool and may go in any thread") {
  std::vector<std::thread> threads;
  {
    BufferPool pool;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([memory = pool.allocate(kMegabyte)]() mutable {
        std::memset(memory.get(), 1, kMegabyte);
        memory.reset();
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torchbeast
