#include "batching_queue.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "errors.h"
#include "testing.h"

namespace torchbeast {
namespace {

using Values = std::vector<std::int32_t>;

QueueOptions sizes(std::int64_t minimum, std::int64_t maximum,
                   std::optional<std::int64_t> queue = {}) {
  return {1, minimum, maximum, {}, queue};
}

}  // namespace

TEST_CASE("a large item is split where a batch is full") {
  BatchingQueue queue(sizes(1, 4));
  queue.enqueue(make_leaf({0, 1, 2}));
  queue.enqueue(make_leaf({3, 4, 5, 6, 7, 8, 9}));
  CHECK(queue.size() == 10);
  CHECK(values(*queue.dequeue()) == Values{0, 1, 2, 3});
  CHECK(queue.size() == 6);
  CHECK(values(*queue.dequeue()) == Values{4, 5, 6, 7});
  CHECK(values(*queue.dequeue()) == Values{8, 9});
}

TEST_CASE("a timeout hands out what there is") {
  BatchingQueue queue({1, 3, 3, 20, {}});
  queue.enqueue(make_leaf({1}));
  const auto start = Clock::now();
  CHECK(values(*queue.dequeue()) == Values{1});
  CHECK(Clock::now() - start >= std::chrono::milliseconds(20));
}

TEST_CASE("sizes that make no sense are refused") {
  CHECK_THROWS_AS(BatchingQueue(sizes(0, 1)), std::invalid_argument);
  CHECK_THROWS_AS(BatchingQueue(sizes(2, 1)), std::invalid_argument);
  CHECK_THROWS_AS(BatchingQueue(sizes(1, 2, 1)), std::invalid_argument);
  CHECK_THROWS_AS(BatchingQueue({-1, 1, 1, {}, {}}), std::invalid_argument);
  CHECK_THROWS_AS(BatchingQueue({1, 1, 1, -1, {}}), std::invalid_argument);
}

TEST_CASE("an exception from poll ends a wait and leaves the rows to others") {
  BatchingQueue queue(sizes(2, 2));
  queue.enqueue(make_leaf({1}));
  struct Interrupt {};
  CHECK_THROWS_AS(queue.dequeue([] { throw Interrupt(); }), Interrupt);
  queue.enqueue(make_leaf({2}));
  CHECK(values(*queue.dequeue()) == Values{1, 2});
}

TEST_CASE("an item that is refused leaves its room to another") {
  BatchingQueue queue(sizes(1, 2, 3));
  for (int i = 0; i < 3; ++i) queue.enqueue(make_leaf({i}));
  ArrayNest misfit = make_leaf({7});
  misfit.leaves[0].dtype = {kFloat, 32, 1};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { CHECK_THROWS_AS(queue.enqueue(misfit), std::invalid_argument); });
  }
  threads.emplace_back([&] { queue.enqueue(make_leaf({3})); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Lets most of them wait.
  CHECK(values(*queue.dequeue()) == Values{0, 1});
  for (std::thread& thread : threads) thread.join();
  CHECK(values(*queue.dequeue()) == Values{2, 3});
}

TEST_CASE("clients get equal shares of a batch, or all that they have") {
  BatchingQueue queue(sizes(1, 6));
  queue.give(make_leaf({0, 1, 2, 3, 4, 5, 6, 7}), {}, 0);
  queue.give(make_leaf({100}), {}, 1);
  queue.give(make_leaf({200, 201, 202}), {}, 2);
  queue.give(make_leaf({203}), {}, 2);
  CHECK(values(*queue.dequeue()) == Values{0, 1, 100, 200, 201, 2});
  CHECK(values(*queue.dequeue()) == Values{202, 203, 3, 4, 5, 6});
  CHECK(values(*queue.dequeue()) == Values{7});
}

TEST_CASE("with more clients than rows in a batch, all have their turn") {
  BatchingQueue queue(sizes(2, 2));
  for (int i = 0; i < 5; ++i) queue.give(make_leaf({i, 10 + i}), {}, i);
  CHECK(values(*queue.dequeue()) == Values{0, 1});
  CHECK(values(*queue.dequeue()) == Values{2, 3});
  CHECK(values(*queue.dequeue()) == Values{4, 10});
  CHECK(values(*queue.dequeue()) == Values{11, 12});
}

TEST_CASE("a client with 64 times as many environments gets half of each batch, not more") {
  BatchingQueue queue(sizes(8, 8));
  for (int i = 0; i < 100; ++i) {
    for (int lane = 0; lane < 64; ++lane) queue.give(make_leaf({1, 1, 1, 1}), {}, 1);
    queue.give(make_leaf({2, 2, 2, 2}), {}, 2);
    const Values batch = values(*queue.dequeue());
    CHECK(std::count(batch.begin(), batch.end(), 1) == 4);
    CHECK(std::count(batch.begin(), batch.end(), 2) == 4);
  }
}

TEST_CASE("a large item in a full queue keeps no other client out") {
  BatchingQueue queue(sizes(8, 8, 8));
  queue.give(make_leaf(Values(512, 1)), {}, 1);
  std::atomic<bool> waits{false}, returned{false};
  std::thread other([&] {
    queue.give(make_leaf({2, 2, 2, 2, 2, 2}), [&] { waits = true; }, 2);
    returned = true;
  });
  while (!waits) std::this_thread::yield();
  CHECK_FALSE(returned);
  CHECK(queue.size() == 512);  // Rows of a producer that is held back are not counted.
  CHECK(values(*queue.dequeue()) == Values{1, 1, 1, 1, 2, 2, 2, 2});
  other.join();
  CHECK(values(*queue.dequeue()) == Values{1, 1, 1, 1, 2, 2, 1, 1});
  CHECK(queue.size() == 512 - 10);
}

TEST_CASE("a producer that is held back and interrupted takes its item with it") {
  BatchingQueue queue(sizes(1, 2, 2));
  queue.give(make_leaf({1, 2}));
  struct Interrupt {};
  CHECK_THROWS_AS(queue.give(make_leaf({3}), [] { throw Interrupt(); }, 0), Interrupt);
  CHECK_THROWS_AS(queue.give(make_leaf({4}), [] { throw Interrupt(); }, 1), Interrupt);
  CHECK(queue.size() == 2);
  CHECK(values(*queue.dequeue()) == Values{1, 2});
  CHECK(queue.size() == 0);
  queue.give(make_leaf({5}), {}, 1);
  CHECK(values(*queue.dequeue()) == Values{5});
}

using Member = BatchingQueue::Member;

// A queue of size 0, and threads that put rows into it.
class WithoutRoom {
 public:
  WithoutRoom(std::int64_t batch_size, const std::vector<Member*>& members)
      : queue(sizes(batch_size, batch_size, 0)) {
    for (Member* member : members) queue.join(*member);
  }

  ~WithoutRoom() {
    queue.close();
    for (std::thread& thread : threads_) thread.join();
  }

  // Gives rows in a new thread, which adds one to `num_back` when it may go on.
  void give(const Values& rows, Member* member = nullptr,
            Clock::duration patience = std::chrono::hours(1)) {
    threads_.emplace_back([=] {
      try {
        queue.give(make_leaf(rows), [this] { ++num_polls; }, 0, member, patience);
        ++num_back;
      } catch (const ClosedBatchingQueue&) {
      }
    });
  }

  // Waits until the threads that are held back have polled a few more times.
  void wait_a_while() {
    const int before = num_polls;
    while (num_polls < before + 4) std::this_thread::yield();
  }

  BatchingQueue queue;
  std::atomic<int> num_back{0}, num_polls{0};

 private:
  std::vector<std::thread> threads_;
};

TEST_CASE("with a queue of size 0 producers wait until the consumer is back for more") {
  Member a{1}, b{1};
  WithoutRoom it(2, {&a, &b});
  it.give({1}, &a);
  it.give({2}, &b);
  CHECK(it.queue.dequeue());
  it.wait_a_while();
  CHECK(it.num_back == 0);  // The consumer has not come back for the next batch.
  std::thread consumer([&it] { CHECK(it.queue.dequeue()); });
  while (it.num_back < 2) std::this_thread::yield();
  it.give({3}, &a);
  it.give({4}, &b);
  consumer.join();
  it.wait_a_while();
  CHECK(it.num_back == 2);
}

TEST_CASE("with a queue of size 0 too few producers fill a batch in turns") {
  BatchingQueue queue(sizes(3, 3, 0));
  Member member{1};
  queue.join(member);
  std::thread producer([&] {
    const auto give = [&](int i) {
      queue.give(make_leaf({i}), {}, 0, &member, std::chrono::hours(1));
    };
    give(1);
    give(2);
    CHECK_THROWS_AS(give(3), ClosedBatchingQueue);  // The consumer does not come back.
  });
  CHECK(values(*queue.dequeue()) == Values{1, 2, 3});
  queue.close();
  producer.join();
}

TEST_CASE("with a queue of size 0 who leaves is not waited for") {
  Member a{1}, b{1};
  WithoutRoom it(2, {&a, &b});
  std::thread consumer([&it] { CHECK(it.queue.dequeue()); });
  it.give({1}, &a);
  it.wait_a_while();
  CHECK(it.num_back == 0);
  it.queue.leave(b);
  while (it.num_back < 1) std::this_thread::yield();
  it.give({2}, &a);
  consumer.join();
}

TEST_CASE("with a queue of size 0 who is late is waited for once") {
  Member a{1}, late{2};
  WithoutRoom it(3, {&a, &late});
  std::thread consumer([&it] { CHECK(it.queue.dequeue()); });
  it.give({1}, &a, std::chrono::milliseconds(50));
  while (it.num_back < 1) std::this_thread::yield();
  it.give({2}, &a);  // Does not wait for its patience of an hour: `late` is not expected.
  while (it.num_back < 2) std::this_thread::yield();
  it.give({3}, &late);
  consumer.join();
}

TEST_CASE("with a queue of size 0 patience is for producers, not for a busy consumer") {
  Member a{1}, b{1}, c{1};
  WithoutRoom it(2, {&a, &b, &c});
  it.give({1}, &a);
  it.give({2}, &b);
  CHECK(it.queue.dequeue());
  it.give({3}, &c, std::chrono::milliseconds(50));
  it.wait_a_while();
  CHECK(it.num_back == 0);
}

TEST_CASE("with a queue of size 0 a producer may be interrupted at any time") {
  BatchingQueue queue(sizes(1, 1, 0));
  Member member{1};
  queue.join(member);
  struct Interrupt {};
  CHECK_THROWS_AS(queue.give(make_leaf({1}), [] { throw Interrupt(); }, 0, &member), Interrupt);
  std::atomic<bool> taken{false};
  std::thread producer([&] {
    const auto poll = [&taken] {
      if (taken) throw Interrupt();
    };
    CHECK_THROWS_AS(queue.give(make_leaf({2}), poll, 0, &member), Interrupt);
  });
  CHECK(values(*queue.dequeue()) == Values{2});
  taken = true;
  producer.join();
  std::thread consumer([&queue] { CHECK(values(*queue.dequeue()) == Values{3}); });
  std::thread last(
      [&] { CHECK_THROWS_AS(queue.give(make_leaf({3}), {}, 0, &member), ClosedBatchingQueue); });
  consumer.join();
  queue.close();
  last.join();
}

TEST_CASE("a queue that shrinks hands out what waits in smaller batches") {
  BatchingQueue queue(sizes(4, 4, 4));
  for (int i = 0; i < 3; ++i) queue.enqueue(make_leaf({i}));
  std::thread consumer([&queue] { CHECK(values(*queue.dequeue()) == Values{0, 1}); });
  queue.resize(2, 2, 2);  // Before or while it waits for four.
  consumer.join();
  queue.enqueue(make_leaf({3}));
  CHECK(values(*queue.dequeue()) == Values{2, 3});
}

TEST_CASE("a queue that grows lets producers go on and has larger batches") {
  BatchingQueue queue(sizes(1, 1, 1));
  queue.enqueue(make_leaf({0}));
  std::atomic<bool> waits{false};
  std::thread producer([&] { queue.give(make_leaf({1}), [&waits] { waits = true; }); });
  while (!waits) std::this_thread::yield();
  queue.resize(3, 3, 6);
  producer.join();
  CHECK(queue.size() == 2);
  queue.enqueue(make_leaf({2}));
  CHECK(values(*queue.dequeue()) == Values{0, 1, 2});
}

TEST_CASE("sizes that make no sense change nothing") {
  BatchingQueue queue(sizes(2, 2, 2)), without_room(sizes(2, 2, 0));
  CHECK_THROWS_AS(queue.resize(0, 1, 1), std::invalid_argument);
  CHECK_THROWS_AS(queue.resize(3, 2, 4), std::invalid_argument);
  CHECK_THROWS_AS(queue.resize(3, 3, 2), std::invalid_argument);
  CHECK_THROWS_AS(queue.resize(3, 3, 0), std::invalid_argument);
  CHECK_THROWS_AS(without_room.resize(3, 3, 3), std::invalid_argument);
  without_room.resize(3, 3, 0);
  queue.enqueue(make_leaf({1, 2, 3}));
  CHECK(values(*queue.dequeue()) == Values{1, 2});
}

TEST_CASE("items that were never to be in one batch keep batches from growing") {
  BatchingQueue queue(sizes(1, 1));
  ArrayNest floats = make_leaf({7});
  floats.leaves[0].dtype = {kFloat, 32, 1};
  queue.give(make_leaf({1}), {}, 1);
  queue.give(floats, {}, 2);
  CHECK_THROWS_AS(queue.resize(2, 2, {}), std::invalid_argument);
  CHECK(queue.dequeue());
  queue.resize(2, 2, {});
}

TEST_CASE("with a queue of size 0 a smaller batch is taken from those who wait") {
  Member a{1}, b{1}, c{1};
  WithoutRoom it(3, {&a, &b, &c});
  it.give({1}, &a);
  it.give({2}, &b);
  it.wait_a_while();
  std::thread consumer([&it] { CHECK(it.queue.dequeue()); });
  it.queue.resize(2, 2, 0);
  consumer.join();
  it.wait_a_while();
  CHECK(it.num_back == 0);
}

TEST_CASE("members are those who have joined and not left") {
  BatchingQueue queue(sizes(1, 1));
  Member a{8}, b{4, 7};
  queue.join(a);
  queue.join(b);
  using Members = std::vector<std::pair<std::int64_t, std::int64_t>>;
  CHECK(queue.members() == Members{{0, 8}, {7, 4}});
  queue.leave(a);
  CHECK(queue.members() == Members{{7, 4}});
}

TEST_CASE("nothing is lost while a queue changes its sizes") {
  constexpr int kProducers = 6, kItems = 400;
  BatchingQueue queue(sizes(1, 3, 4));
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int p = 0; p < kProducers; ++p) {
    threads.emplace_back([&queue, p] {
      for (int i = 0; i < kItems; ++i) queue.give(make_leaf({p, p}), {}, p % 3);
    });
  }
  std::thread other([&] {
    for (std::int64_t i = 0; !over; ++i) {
      const std::int64_t size = 1 + i % 9;
      queue.resize(1, size, size + i % 2);
    }
  });
  std::vector<int> counts(kProducers);
  for (int missing = 2 * kProducers * kItems; missing > 0;) {
    const Values rows = values(*queue.dequeue());
    for (const std::int32_t row : rows) ++counts[static_cast<std::size_t>(row)];
    missing -= static_cast<int>(rows.size());
  }
  over = true;
  other.join();
  for (std::thread& thread : threads) thread.join();
  CHECK(counts == std::vector<int>(kProducers, 2 * kItems));
}

TEST_CASE("close() wakes producers and consumers") {
  BatchingQueue full(sizes(1, 1, 1)), empty(sizes(1, 1));
  full.enqueue(make_leaf({1}));
  std::thread producer(
      [&full] { CHECK_THROWS_AS(full.enqueue(make_leaf({2})), ClosedBatchingQueue); });
  std::thread consumer([&empty] { CHECK_FALSE(empty.dequeue()); });
  full.close();
  empty.close();
  producer.join();
  consumer.join();
  CHECK_THROWS_AS(full.close(), std::runtime_error);
  CHECK(full.is_closed());
}

TEST_CASE("many producers and consumers lose nothing and keep each producer's order") {
  constexpr int kProducers = 8, kConsumers = 4, kItems = 300;
  BatchingQueue queue(sizes(1, 5, 7));
  std::atomic<int> missing{0};
  for (int i = 0; i < kItems; ++i) missing += i % 3 + 1;
  missing = missing * kProducers;

  std::mutex mutex;
  std::map<std::int32_t, int> seen;
  std::vector<std::thread> threads;
  for (int p = 0; p < kProducers; ++p) {
    threads.emplace_back([&queue, p] {
      std::int32_t next = p * 1'000'000;
      for (int i = 0; i < kItems; ++i) {
        Values item;
        for (int row = 0; row < i % 3 + 1; ++row) item.push_back(next++);
        queue.enqueue(make_leaf(item));
      }
    });
  }
  for (int c = 0; c < kConsumers; ++c) {
    threads.emplace_back([&] {
      std::map<std::int32_t, std::int32_t> last;  // Of each producer, as this consumer saw it.
      while (const auto batch = queue.dequeue()) {
        const Values rows = values(*batch);
        for (const std::int32_t row : rows) {
          const auto [entry, is_new] = last.emplace(row / 1'000'000, row);
          if (!is_new && entry->second >= row) FAIL("out of order");
          entry->second = row;
        }
        {
          const std::lock_guard<std::mutex> lock(mutex);
          for (const std::int32_t row : rows) ++seen[row];
        }
        if ((missing -= static_cast<int>(rows.size())) == 0) queue.close();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(missing == 0);
  for (const auto& [row, count] : seen) CHECK(count == 1);
}

}  // namespace torchbeast
