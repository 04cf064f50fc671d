#include "actor_pool.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "errors.h"
#include "rollout.h"
#include "testing.h"

namespace torchbeast {
namespace {

using State = Turn::State;
using Values = std::vector<std::int32_t>;

constexpr std::int64_t kUnrollLength = 4;

ArrayNest tuple_of(std::vector<Array> leaves) {
  std::vector<ArrayNest> nests;
  for (Array& leaf : leaves) {
    auto structure = std::make_shared<Structure>();
    structure->add_leaf();
    nests.push_back({structure, {std::move(leaf)}});
  }
  return tuple_of_nests(nests);
}

Array zeros(const Shape& shape) {
  std::size_t size = 1;
  for (const std::int64_t n : shape) size *= static_cast<std::size_t>(n);
  return make_array(shape, Values(size));
}

// A lane of K environments in this process. Their observation is the number of the step, and the
// reward is the last action.
class Environments {
 public:
  Environments(std::int64_t num_envs, std::size_t num_fields) : num_envs_(num_envs) {
    std::vector<Array> fields;
    for (std::size_t i = 0; i < num_fields; ++i) fields.push_back(zeros({1, num_envs}));
    lane_ = std::make_unique<Lane>(Lane{Turn(word_.get(), word_), tuple_of(fields),
                                        children(tuple_of({zeros({1, num_envs})})).front()});
  }

  const Lane& lane() const { return *lane_; }

  // Writes rows until the lane is closed, or leaves after num_steps.
  void step(int num_steps) {
    const auto deadline = [] { return Clock::now() + std::chrono::seconds(20); };
    lane_->turn.wait_while(State::kGone, deadline());
    write_rows(0, true);
    CHECK(lane_->turn.pass(State::kFree, State::kAgent));
    for (int i = 1; i <= num_steps; ++i) {
      if (lane_->turn.wait_while(State::kAgent, deadline()) != State::kEnvironment) return;
      write_rows(i, false);
      if (!lane_->turn.pass(State::kEnvironment, State::kAgent)) return;
    }
    // Not before the last row was read, or it would never have come.
    if (lane_->turn.wait_while(State::kAgent, deadline()) == State::kEnvironment) {
      lane_->turn.abandon();
    }
  }

 private:
  void write_rows(int step, bool done) {
    for (std::int64_t i = 0; i < num_envs_; ++i) {
      const auto value = static_cast<std::int32_t>(step + 1000 * i);
      at(lane_->row.leaves[kObservation], i) = value;
      at(lane_->row.leaves[kReward], i) = at(lane_->action.leaves[0], i);
      at(lane_->row.leaves[kDone], i) = done;
    }
  }

  static std::int32_t& at(const Array& array, std::int64_t i) {
    return reinterpret_cast<std::int32_t*>(array.data)[i];
  }

  std::int64_t num_envs_;
  std::shared_ptr<std::uint32_t> word_ = std::make_shared<std::uint32_t>(0);
  std::unique_ptr<Lane> lane_;
};

// Its state counts the rows it has seen; the action is observation + 100 * state.
void run_agent(DynamicBatcher& batcher) {
  while (auto batch = batcher.get_batch()) {
    const Values observation = values(batch->inputs().leaves[kObservation]);
    Values state = values(batch->inputs().leaves.back());
    Values action(observation.size());
    for (std::size_t i = 0; i < state.size(); ++i) {
      action[i] = observation[i] + 100 * state[i];
      ++state[i];
    }
    const auto size = static_cast<std::int64_t>(state.size());
    const ArrayNest output = tuple_of({make_array({1, size}, action)});
    const ArrayNest new_state = tuple_of({make_array({1, size}, state)});
    batch->set_outputs(tuple_of_nests({output, new_state}));
  }
}

// Everything that an actor needs, and a learner to look at its rollouts.
struct System {
  explicit System(std::int64_t batch_size)
      : queue({1, batch_size, batch_size, {}, 64}),
        batcher({1, 1, 64, 10, {}}),
        agent([this] { run_agent(batcher); }),
        pool(kUnrollLength, queue, batcher, tuple_of({zeros({1, 1})})) {}
  ~System() {
    if (!queue.is_closed()) queue.close();
    if (!batcher.is_closed()) batcher.close();
    agent.join();
  }
  BatchingQueue queue;
  DynamicBatcher batcher;
  std::thread agent;
  ActorPool pool;
};

// The leaves of a batch of the learner.
struct RolloutBatch {
  explicit RolloutBatch(const ArrayNest& nest, std::size_t num_fields)
      : observation(values(nest.leaves[kObservation])),
        reward(values(nest.leaves[kReward])),
        done(values(nest.leaves[kDone])),
        action(values(nest.leaves[num_fields])),
        state(values(nest.leaves[num_fields + 1])) {}
  Values observation, reward, done, action, state;
};

Values from_to(int first, int last) {
  Values result(static_cast<std::size_t>(last - first + 1));
  std::iota(result.begin(), result.end(), first);
  return result;
}

}  // namespace

TEST_CASE("rows, outputs and state continue exactly from rollout to rollout") {
  System system(1);
  Environments environments(1, 7);
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] { environments.step(1'000'000); });
  std::int32_t last_action = 0;
  for (int i = 0; i < 50; ++i) {
    const RolloutBatch batch(*system.queue.dequeue(), 7);
    const int first = i * static_cast<int>(kUnrollLength);
    CHECK(batch.observation == from_to(first, first + 4));
    CHECK(batch.state == Values{first});
    CHECK(batch.action[0] == last_action);
    for (int t = 1; t <= kUnrollLength; ++t) {
      const auto row = static_cast<std::size_t>(t);
      const std::int32_t seen = first + t - 1;
      CHECK(batch.action[row] == seen + 100 * seen);  // Output t led to row t.
      CHECK(batch.reward[row] == batch.action[row]);
    }
    last_action = batch.action.back();
  }
  system.pool.close();
  stepping.join();
  system.pool.run();
  CHECK(system.pool.num_actors() == 0);
}

TEST_CASE("many lanes keep to themselves and every transition comes once and in order") {
  constexpr int kLanes = 6;
  System system(2);
  std::vector<std::unique_ptr<Environments>> lanes;
  std::vector<std::thread> stepping;
  for (int i = 0; i < kLanes; ++i) {
    lanes.push_back(std::make_unique<Environments>(1 + i % 3, 7));
    system.pool.add_lane(lanes.back()->lane());
    stepping.emplace_back([lane = lanes.back().get()] { lane->step(1'000'000); });
  }
  for (int i = 0; i < 200; ++i) {
    const RolloutBatch batch(*system.queue.dequeue(), 7);
    REQUIRE(batch.observation.size() == 10);  // 5 rows of 2 columns.
    for (std::size_t column = 0; column < 2; ++column) {
      for (std::size_t t = 1; t < 5; ++t) {
        const std::size_t now = 2 * t + column, before = now - 2;
        CHECK(batch.observation[now] == batch.observation[before] + 1);
        CHECK(batch.reward[now] == batch.action[now]);
      }
      CHECK(batch.observation[column] % 1000 % kUnrollLength == 0);
      CHECK(batch.state[column] == batch.observation[column] % 1000);
    }
  }
  system.queue.close();
  system.pool.run();
  for (std::thread& thread : stepping) thread.join();
}

TEST_CASE("an open rollout is padded when its environments leave, and others may come") {
  System system(1);
  Environments environments(1, 7);
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] {
    environments.step(6);
    environments.step(1'000'000);
  });
  CHECK(RolloutBatch(*system.queue.dequeue(), 7).observation == from_to(0, 4));
  const ArrayNest nest = *system.queue.dequeue();
  const RolloutBatch padded(nest, 7);
  CHECK(padded.observation == Values{4, 5, 6, 0, 0});
  constexpr std::int32_t kAllBytes = 0x01010101;  // Flags are one byte in earnest.
  CHECK(padded.done == Values{0, 0, 0, kAllBytes, kAllBytes});
  CHECK(values(nest.leaves[kTruncated]) == Values{0, 0, 0, kAllBytes, kAllBytes});
  const RolloutBatch next(*system.queue.dequeue(), 7);
  CHECK(next.observation == from_to(0, 4));
  CHECK(next.state == Values{0});  // And so does the agent's memory.
  CHECK(system.pool.counts().padded_rollouts == 1);
  system.pool.close();
  stepping.join();
}

TEST_CASE("rows that cannot say that they are padding are dropped instead") {
  System system(1);
  Environments environments(1, 5);
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] {
    environments.step(6);
    environments.step(1'000'000);
  });
  CHECK(RolloutBatch(*system.queue.dequeue(), 5).observation == from_to(0, 4));
  CHECK(RolloutBatch(*system.queue.dequeue(), 5).observation == from_to(0, 4));
  CHECK(system.pool.counts().dropped_rollouts == 1);
  system.pool.close();
  stepping.join();
}

TEST_CASE("a full learner queue holds the actors back, and closing lets them go") {
  BatchingQueue queue({1, 1, 1, {}, 1});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  std::thread agent([&] { run_agent(batcher); });
  Environments environments(1, 7);
  ActorPool pool(1, queue, batcher, tuple_of({zeros({1, 1})}));
  pool.add_lane(environments.lane());
  std::thread stepping([&] { environments.step(1'000'000); });
  while (queue.size() < 1) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(pool.counts().steps <= 2);
  queue.close();
  pool.run();
  stepping.join();
  batcher.close();
  agent.join();
}

TEST_CASE("an answer of the wrong kind is told to run()") {
  BatchingQueue queue({1, 1, 1, {}, {}});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  std::thread agent([&] {
    const auto batch = batcher.get_batch();
    batch->set_outputs(tuple_of_nests({tuple_of({zeros({1, 1, 2})}), tuple_of({zeros({1, 1})})}));
  });
  Environments environments(1, 7);
  ActorPool pool(kUnrollLength, queue, batcher, tuple_of({zeros({1, 1})}));
  pool.add_lane(environments.lane());
  std::thread stepping([&] { environments.step(1'000'000); });
  CHECK_THROWS_WITH_AS(pool.run(),
                       "The environments expect an action int32 [1, 1], the agent gave int32 "
                       "[1, 1, 2]",
                       std::invalid_argument);
  stepping.join();
  agent.join();
}

TEST_CASE("nothing stays of a lane that was closed when the next one comes") {
  System system(1);
  Environments first(1, 7), second(1, 7);
  auto word = std::make_shared<std::uint32_t>(0);
  const std::weak_ptr<std::uint32_t> memory = word;
  system.pool.add_lane({Turn(word.get(), word), first.lane().row, first.lane().action});
  Turn(word.get(), word).close();
  word.reset();
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (system.pool.num_actors() > 0 && Clock::now() < deadline) std::this_thread::yield();
  system.pool.add_lane(second.lane());
  CHECK(memory.expired());
  CHECK(system.pool.num_actors() == 1);
}

#ifndef __SANITIZE_THREAD__  // which ends children of processes with threads
TEST_CASE("a forked child lets go of the pool and leaves the parent's lanes alone") {
  System system(1);
  Environments environments(1, 7);
  auto pool = std::make_unique<ActorPool>(kUnrollLength, system.queue, system.batcher,
                                          tuple_of({zeros({1, 1})}));
  pool->add_lane(environments.lane());
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    pool.reset();
    ::_exit(environments.lane().turn.state() == State::kFree ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(pool->num_actors() == 1);
}
#endif

TEST_CASE("a pool without environments ends, too") {
  System system(1);
  Environments nobody(1, 7);
  system.pool.add_lane(nobody.lane());
  std::thread closing([&] { system.batcher.close(); });
  system.pool.run();
  closing.join();
  CHECK(nobody.lane().turn.state() == State::kClosed);
}

}  // namespace torchbeast
