#include "dynamic_batcher.h"

#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "errors.h"
#include "testing.h"

namespace torchbeast {
namespace {

using Values = std::vector<std::int32_t>;

QueueOptions sizes(std::int64_t minimum, std::int64_t maximum) {
  return {1, minimum, maximum, {}, {}};
}

// Answers with the inputs, each a hundred larger.
void answer(Batch& batch) {
  Values outputs = values(batch.inputs());
  for (std::int32_t& value : outputs) value += 100;
  batch.set_outputs(make_leaf(outputs));
}

}  // namespace

TEST_CASE("every caller gets its own rows back") {
  DynamicBatcher batcher(sizes(3, 3));
  std::thread one([&] { CHECK(values(batcher.compute(make_leaf({1}))) == Values{101}); });
  std::thread two([&] { CHECK(values(batcher.compute(make_leaf({2, 3}))) == Values{102, 103}); });
  answer(*batcher.get_batch());
  one.join();
  two.join();
}

TEST_CASE("the answers to a split item come back as one, in order") {
  DynamicBatcher batcher(sizes(1, 2));
  std::thread caller([&] {
    CHECK(values(batcher.compute(make_leaf({1, 2, 3, 4, 5}))) == Values{101, 102, 103, 104, 105});
  });
  auto first = batcher.get_batch(), second = batcher.get_batch(), third = batcher.get_batch();
  answer(*third);
  answer(*first);
  answer(*second);
  caller.join();
}

TEST_CASE("outputs of wrong shape are refused and may be set again") {
  DynamicBatcher batcher(sizes(1, 2));
  std::thread caller([&] { CHECK(values(batcher.compute(make_leaf({1}))) == Values{101}); });
  auto batch = batcher.get_batch();
  ArrayNest flat = make_leaf({1});
  flat.leaves[0] = make_array({1}, {1});
  CHECK_THROWS_AS(batch->set_outputs(flat), std::invalid_argument);
  CHECK_THROWS_AS(batch->set_outputs(make_leaf({1, 2})), std::invalid_argument);
  answer(*batch);
  CHECK_THROWS_WITH_AS(answer(*batch), "set_outputs called twice", std::runtime_error);
  caller.join();
}

TEST_CASE("a dropped batch breaks its callers' promise") {
  DynamicBatcher batcher(sizes(1, 2));
  std::thread caller([&] { CHECK_THROWS_AS(batcher.compute(make_leaf({1, 2, 3})), AsyncError); });
  {
    auto dropped = batcher.get_batch();
  }
  answer(*batcher.get_batch());  // The rest of the item; nobody waits for it any more.
  caller.join();
}

TEST_CASE("an exception reaches every caller") {
  DynamicBatcher batcher(sizes(2, 2));
  struct Whole {
    int value;
  };
  const auto call = [&] {
    try {
      batcher.compute(make_leaf({1}));
      FAIL("no exception");
    } catch (const Whole& whole) {
      CHECK(whole.value == 7);
    }
  };
  std::thread one(call), two(call);
  batcher.get_batch()->set_exception([] { throw Whole{7}; });
  one.join();
  two.join();
}

TEST_CASE("close() ends those in the queue and those in a batch") {
  DynamicBatcher batcher(sizes(1, 1));
  const auto call = [&] { CHECK_THROWS_AS(batcher.compute(make_leaf({1})), ClosedBatchingQueue); };
  std::thread one(call), two(call);
  auto batch = batcher.get_batch();
  batcher.close();
  one.join();
  two.join();
  CHECK_NOTHROW(answer(*batch));  // The consumer need not know.
  CHECK(batcher.get_batch() == nullptr);
}

TEST_CASE("an answer need not be waited for: whoever gives it passes it on") {
  DynamicBatcher batcher(sizes(1, 2));
  std::atomic<int> num_calls{0};
  const auto call = batcher.call(make_leaf({1, 2, 3}), {}, [&](const ArrayNest* outputs) {
    ++num_calls;
    CHECK(values(*outputs) == Values{101, 102, 103});
  });
  CHECK(batcher.size() == 3);
  answer(*batcher.get_batch());
  CHECK(num_calls == 0);  // A row is missing.
  answer(*batcher.get_batch());
  CHECK(num_calls == 1);
  CHECK(values(call->get()) == Values{101, 102, 103});
}

TEST_CASE("whoever is called with an answer hears of exceptions, and may throw some") {
  DynamicBatcher batcher(sizes(1, 1));
  int num_calls = 0;
  const auto refuse = [&](const ArrayNest* outputs) {
    ++num_calls;
    if (outputs != nullptr) throw std::runtime_error("no such action");
  };
  const auto refused = batcher.call(make_leaf({1}), {}, refuse);
  CHECK_NOTHROW(answer(*batcher.get_batch()));  // The exception goes to the caller instead.
  CHECK(num_calls == 2);
  CHECK_THROWS_WITH(refused->get(), "no such action");

  const auto dropped = batcher.call(make_leaf({1}), {}, refuse);
  batcher.get_batch().reset();
  CHECK(num_calls == 3);
  CHECK_THROWS_AS(dropped->get(), AsyncError);

  const auto closed = batcher.call(make_leaf({1}), {}, refuse);
  batcher.close();
  CHECK(num_calls == 4);
  CHECK_THROWS_AS(closed->get(), ClosedBatchingQueue);
}

TEST_CASE("who has left is not called") {
  DynamicBatcher batcher(sizes(1, 1));
  batcher.call(make_leaf({1}), {}, [](const ArrayNest*) { FAIL("called"); });
  CHECK_NOTHROW(answer(*batcher.get_batch()));
}

TEST_CASE("64 computing and 16 consuming lose nothing") {
  constexpr int kCallers = 64, kConsumers = 16, kCalls = 100;
  DynamicBatcher batcher(sizes(1, 24));
  std::atomic<int> missing{kCallers * kCalls};
  std::vector<std::thread> threads;
  for (int c = 0; c < kCallers; ++c) {
    threads.emplace_back([&, c] {
      for (int i = 0; i < kCalls; ++i) {
        const Values rows(static_cast<std::size_t>(c % 3 + 1), c * kCalls + i);
        const Values outputs = values(batcher.compute(make_leaf(rows)));
        if (outputs != Values(rows.size(), c * kCalls + i + 100)) FAIL("wrong rows");
        if (--missing == 0) batcher.close();
      }
    });
  }
  for (int c = 0; c < kConsumers; ++c) {
    threads.emplace_back([&] {
      while (auto batch = batcher.get_batch()) answer(*batch);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(missing == 0);
}

}  // namespace torchbeast
