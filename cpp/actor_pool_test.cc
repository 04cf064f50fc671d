#include "actor_pool.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "action.h"
#include "testing.h"

namespace torchbeast {
namespace {

using State = Turn::State;
using Values = std::vector<std::int32_t>;

constexpr std::int64_t kUnrollLength = 4;

Array zeros(const Shape& shape) {
  std::size_t size = 1;
  for (const std::int64_t n : shape) size *= static_cast<std::size_t>(n);
  return make_array(shape, Values(size));
}

Array flags(const Shape& shape) {
  return make_array_of<std::uint8_t>(
      {kBool, 8, 1}, shape, std::vector<std::uint8_t>(static_cast<std::size_t>(shape.back())));
}

// The two kinds of rows: our own, and the one for code written for TorchBeast.
enum class Kind { kDict, kTuple };

ArrayNest make_row(Kind kind, std::int64_t num_envs) {
  const Shape shape{1, num_envs};
  if (kind == Kind::kTuple) {
    return tuple_of({zeros(shape), zeros(shape), flags(shape), zeros(shape), zeros(shape)});
  }
  return dict_of({{"frame", leaf_of(zeros(shape))},
                  {"reward", leaf_of(zeros(shape))},
                  {"done", leaf_of(flags(shape))},
                  {"truncated", leaf_of(flags(shape))},
                  {"episode_step", leaf_of(zeros(shape))},
                  {"episode_return", leaf_of(zeros(shape))},
                  {"last_action", leaf_of(zeros(shape))}});
}

Array field(const ArrayNest& row, const std::string& name) {
  if (const auto found = child_at(row, name)) return found->leaves.front();
  const std::vector<std::string> fields{"frame", "reward", "done"};
  const auto index = std::find(fields.begin(), fields.end(), name) - fields.begin();
  return children(row)[static_cast<std::size_t>(index)].leaves.front();
}

// A lane of K environments in this process. Their frame is the number of the step, and the
// reward is the last action.
class Environments {
 public:
  explicit Environments(std::int64_t num_envs, Kind kind = Kind::kDict) : num_envs_(num_envs) {
    lane_ = std::make_unique<Lane>(
        Lane{Turn(word_.get(), word_), make_row(kind, num_envs), leaf_of(zeros({1, num_envs}))});
  }

  const Lane& lane() const { return *lane_; }

  // Makes them like a host of an older version, which does not know that rows are marked.
  void know_no_marks() { lane_->marks_rows = false; }

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
      const std::uint32_t word = __atomic_load_n(word_.get(), __ATOMIC_ACQUIRE);
      if (!lane_->marks_rows && word > State::kClosed) FAIL("marked");
    }
    // Leaves only when the last row has been answered; else it might never be read.
    if (lane_->turn.wait_while(State::kAgent, deadline()) == State::kEnvironment) {
      lane_->turn.abandon();
    }
  }

 private:
  void write_rows(int step, bool done) {
    for (std::int64_t i = 0; i < num_envs_; ++i) {
      at<std::int32_t>("frame", i) = static_cast<std::int32_t>(step + 1000 * i);
      at<std::int32_t>("reward", i) =
          reinterpret_cast<std::int32_t*>(lane_->action.leaves[0].data)[i];
      at<bool>("done", i) = done;
    }
  }

  template <typename T>
  T& at(const std::string& name, std::int64_t i) {
    return reinterpret_cast<T*>(field(lane_->row, name).data)[i];
  }

  std::int64_t num_envs_;
  std::shared_ptr<std::uint32_t> word_ = std::make_shared<std::uint32_t>(0);
  std::unique_ptr<Lane> lane_;
};

// An agent whose state counts the rows that it has seen. The action is frame + 100 * state; an
// output that is a dict also has twice the action as the baseline.
void run_agent(DynamicBatcher& batcher, Kind output_kind) {
  while (auto batch = batcher.get_batch()) {
    const Values frame = values(field(children(batch->inputs())[0], "frame"));
    Values state = values(batch->inputs().leaves.back());
    Values action(frame.size()), baseline(frame.size());
    for (std::size_t i = 0; i < state.size(); ++i) {
      action[i] = frame[i] + 100 * state[i];
      baseline[i] = 2 * action[i];
      ++state[i];
    }
    const Shape shape{1, static_cast<std::int64_t>(state.size())};
    const Array action_array = make_array(shape, action);
    const ArrayNest output =
        output_kind == Kind::kTuple
            ? tuple_of({action_array})
            : dict_of({{"action", leaf_of(action_array)},
                       {"a_baseline", leaf_of(make_array(shape, baseline))}});  // Sorts before.
    batch->set_outputs(tuple_of_nests({output, tuple_of({make_array(shape, state)})}));
  }
}

// Everything that an actor needs, and a learner to look at its rollouts.
struct System {
  explicit System(std::int64_t batch_size, Kind output_kind = Kind::kDict)
      : queue({1, batch_size, batch_size, {}, 64}),
        batcher({1, 1, 64, 10, {}}),
        agent([this, output_kind] { run_agent(batcher, output_kind); }),
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

// A batch of the learner.
struct RolloutBatch {
  explicit RolloutBatch(const ArrayNest& nest)
      : rows(children(children(nest)[0])[0]),
        outputs(children(children(nest)[0])[1]),
        frame(values(field(rows, "frame"))),
        reward(values(field(rows, "reward"))),
        done(values_of<std::uint8_t>(field(rows, "done"))),
        action(values(action_of(outputs))),
        state(values(nest.leaves.back())) {}
  ArrayNest rows, outputs;
  Values frame, reward;
  std::vector<std::uint8_t> done;
  Values action, state;
};

Values from_to(int first, int last) {
  Values result(static_cast<std::size_t>(last - first + 1));
  std::iota(result.begin(), result.end(), first);
  return result;
}

}  // namespace

TEST_CASE("rows, outputs and state continue exactly from rollout to rollout") {
  Kind kind = Kind::kDict;
  bool has_marks = true;
  SUBCASE("as dicts") { kind = Kind::kDict; }
  SUBCASE("as tuples, for code written for TorchBeast") { kind = Kind::kTuple; }
  SUBCASE("on lanes of hosts of older versions") { has_marks = false; }
  System system(1, kind);
  Environments environments(1, kind);
  if (!has_marks) environments.know_no_marks();
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] { environments.step(1'000'000); });
  std::int32_t last_action = 0;
  for (int i = 0; i < 50; ++i) {
    const RolloutBatch batch(*system.queue.dequeue());
    const int first = i * static_cast<int>(kUnrollLength);
    CHECK(batch.frame == from_to(first, first + 4));
    CHECK(batch.rows.structure->matches(*environments.lane().row.structure));
    CHECK(batch.outputs.structure->describe() ==
          (kind == Kind::kDict ? "{a_baseline: *, action: *}" : "(*,)"));
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
    lanes.push_back(std::make_unique<Environments>(1 + i % 3));
    system.pool.add_lane(lanes.back()->lane());
    stepping.emplace_back([lane = lanes.back().get()] { lane->step(1'000'000); });
  }
  for (int i = 0; i < 200; ++i) {
    const RolloutBatch batch(*system.queue.dequeue());
    REQUIRE(batch.frame.size() == 10);  // 5 rows of 2 columns.
    for (std::size_t column = 0; column < 2; ++column) {
      for (std::size_t t = 1; t < 5; ++t) {
        const std::size_t now = 2 * t + column, before = now - 2;
        CHECK(batch.frame[now] == batch.frame[before] + 1);
        CHECK(batch.reward[now] == batch.action[now]);
      }
      CHECK(batch.frame[column] % 1000 % kUnrollLength == 0);
      CHECK(batch.state[column] == batch.frame[column] % 1000);
    }
  }
  system.queue.close();
  system.pool.run();
  for (std::thread& thread : stepping) thread.join();
}

TEST_CASE("each lane's client has its share of the learner's batches") {
  System system(2);
  Environments many(60), one(1);
  Lane lane = one.lane();
  lane.client = 7;
  system.pool.add_lane(many.lane());
  system.pool.add_lane(lane);
  many.step(kUnrollLength);  // A rollout each.
  one.step(kUnrollLength);
  while (system.queue.size() < 61) std::this_thread::yield();
  CHECK(RolloutBatch(*system.queue.dequeue()).frame == Values{0, 0, 1, 1, 2, 2, 3, 3, 4, 4});
  CHECK(RolloutBatch(*system.queue.dequeue()).frame[0] == 1000);
}

TEST_CASE("open rollouts are padded when their environments leave, and others may come") {
  using Flags = std::vector<std::uint8_t>;
  System system(2);
  Environments environments(2);
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] {
    environments.step(6);
    environments.step(1'000'000);
  });
  const Values first_rollouts{0, 1000, 1, 1001, 2, 1002, 3, 1003, 4, 1004};
  CHECK(RolloutBatch(*system.queue.dequeue()).frame == first_rollouts);
  const RolloutBatch padded(*system.queue.dequeue());
  CHECK(padded.frame == Values{4, 1004, 5, 1005, 6, 1006, 0, 0, 0, 0});
  CHECK(padded.done == Flags{0, 0, 0, 0, 0, 0, 1, 1, 1, 1});
  CHECK(values_of<std::uint8_t>(field(padded.rows, "truncated")) == padded.done);
  const RolloutBatch next(*system.queue.dequeue());
  CHECK(next.frame == first_rollouts);
  CHECK(next.state == Values{0, 0});  // And so does the agent's memory.
  CHECK(system.pool.counts().padded_rollouts == 2);
  CHECK(system.pool.counts().dropped_rollouts == 0);
  system.pool.close();
  stepping.join();
}

TEST_CASE("rows that cannot say that they are padding are dropped instead") {
  System system(2);
  Environments environments(2, Kind::kTuple);
  system.pool.add_lane(environments.lane());
  std::thread stepping([&] {
    environments.step(6);
    environments.step(1'000'000);
  });
  CHECK(RolloutBatch(*system.queue.dequeue()).frame[0] == 0);
  CHECK(RolloutBatch(*system.queue.dequeue()).frame[0] == 0);
  CHECK(system.pool.counts().dropped_rollouts == 2);
  CHECK(system.pool.counts().padded_rollouts == 0);
  system.pool.close();
  stepping.join();
}

TEST_CASE("a lane whose arrays do not agree on the number of environments is refused") {
  System system(1);
  const Environments environments(2);
  const Turn& turn = environments.lane().turn;
  const ArrayNest row = make_row(Kind::kDict, 2), action = leaf_of(zeros({1, 2}));
  CHECK_THROWS_WITH_AS(system.pool.add_lane({turn, row, leaf_of(zeros({1, 3}))}),
                       "A lane's arrays must be [1, K, ...] with the same number K of "
                       "environments, got [1, 3] with K = 2",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(system.pool.add_lane({turn, leaf_of(zeros({2})), action}),
                       "A lane's arrays must be [1, K, ...] with the same number K of "
                       "environments, got [2]",
                       std::invalid_argument);
  CHECK_THROWS_AS(system.pool.add_lane({turn, tuple_of({}), action}), std::invalid_argument);
  CHECK(system.pool.num_actors() == 0);
}

TEST_CASE("a full learner queue holds the actors back, and closing lets them go") {
  BatchingQueue queue({1, 1, 1, {}, 1});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  std::thread agent([&] { run_agent(batcher, Kind::kDict); });
  Environments environments(1);
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

TEST_CASE("run() throws when the agent answers with an action of another shape") {
  BatchingQueue queue({1, 1, 1, {}, {}});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  std::thread agent([&] {
    const auto batch = batcher.get_batch();
    batch->set_outputs(tuple_of_nests({tuple_of({zeros({1, 1, 2})}), tuple_of({zeros({1, 1})})}));
  });
  Environments environments(1);
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
  Environments first(1), second(1);
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

TEST_CASE("nothing stays of a lane that was closed while the pool runs") {
  System system(1);
  Environments environments(1);
  auto word = std::make_shared<std::uint32_t>(0);
  const std::weak_ptr<std::uint32_t> memory = word;
  system.pool.add_lane(
      {Turn(word.get(), word), environments.lane().row, environments.lane().action});
  std::thread running([&] { system.pool.run(); });
  Turn(word.get(), word).close();
  word.reset();
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (!memory.expired() && Clock::now() < deadline) std::this_thread::yield();
  CHECK(memory.expired());
  system.queue.close();
  running.join();
}

#ifndef __SANITIZE_THREAD__  // The sanitizer ends forked children of processes with threads.
TEST_CASE("a forked child lets go of the pool and leaves the parent's lanes alone") {
  System system(1);
  Environments environments(1);
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

TEST_CASE("whole rollouts go to the learner, one after the other, and copies of them") {
  System system(2);
  const Shape shape{kUnrollLength + 1, 2};
  const Array memory = zeros(shape);
  auto word = std::make_shared<std::uint32_t>(0);
  const Turn turn(word.get(), word);
  Lane lane{turn, tuple_of_nests({tuple_of({memory}), tuple_of({zeros({3, 2})})}), tuple_of({})};
  lane.has_rollouts = true;
  system.pool.add_lane(lane);
  const auto deadline = [] { return Clock::now() + std::chrono::seconds(20); };
  const auto write = [&](std::int32_t value) {
    auto* numbers = reinterpret_cast<std::int32_t*>(memory.data);
    std::fill(numbers, numbers + 2 * (kUnrollLength + 1), value);
  };
  State before = State::kFree;
  for (std::int32_t i = 0; i < 5; ++i) {
    write(i);
    CHECK(turn.pass(before, State::kAgent));
    CHECK(turn.wait_while(State::kAgent, deadline()) == State::kEnvironment);
    before = State::kEnvironment;
    write(-1);  // The side that has the turn may write.
    const ArrayNest batch = *system.queue.dequeue();
    CHECK(values(batch.leaves[0]) == Values(2 * (kUnrollLength + 1), i));
    CHECK(batch.leaves[1].shape == Shape{3, 2});
  }
  CHECK(system.pool.counts().steps == 5 * 2 * kUnrollLength);
  CHECK(system.pool.counts().rollouts == 5 * 2);

  SUBCASE("what was half-written when its gateway died is not seen") {
    turn.abandon();
    CHECK(turn.wait_while(State::kGone, deadline()) == State::kFree);
    CHECK(system.queue.size() == 0);
    write(7);
    CHECK(turn.pass(State::kFree, State::kAgent));
    CHECK(values((*system.queue.dequeue()).leaves[0])[0] == 7);
  }
  SUBCASE("the lane ends with the pool") {
    system.pool.close();
    system.pool.run();
    CHECK(turn.state() == State::kClosed);
  }
}

TEST_CASE("who brings rollouts is held back while the learner's queue is full") {
  BatchingQueue queue({1, 1, 1, {}, 1});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  ActorPool pool(kUnrollLength, queue, batcher, tuple_of({}));
  auto word = std::make_shared<std::uint32_t>(0);
  const Turn turn(word.get(), word);
  Lane lane{turn, tuple_of({zeros({kUnrollLength + 1, 1})}), tuple_of({})};
  lane.has_rollouts = true;
  pool.add_lane(lane);
  const auto soon = [] { return Clock::now() + std::chrono::milliseconds(100); };
  const auto deadline = [] { return Clock::now() + std::chrono::seconds(20); };
  CHECK(turn.pass(State::kFree, State::kAgent));
  CHECK(turn.wait_while(State::kAgent, deadline()) == State::kEnvironment);
  CHECK(turn.pass(State::kEnvironment, State::kAgent));
  CHECK(turn.wait_while(State::kAgent, soon()) == State::kAgent);
  CHECK(queue.dequeue());
  CHECK(turn.wait_while(State::kAgent, deadline()) == State::kEnvironment);
  queue.close();
  batcher.close();
}

// Sends rollouts of two environments, each filled with one number, and dies now and then.
void bring_rollouts(ActorPool& pool, std::int32_t host) {
  const auto deadline = [] { return Clock::now() + std::chrono::seconds(20); };
  const Array memory = zeros({kUnrollLength + 1, 2});
  auto* numbers = reinterpret_cast<std::int32_t*>(memory.data);
  auto word = std::make_shared<std::uint32_t>(0);
  const Turn turn(word.get(), word);
  Lane lane{turn, tuple_of({memory}), tuple_of({})};
  lane.client = host % 2;
  lane.has_rollouts = true;
  pool.add_lane(lane);
  State before = State::kFree;
  const auto die = [&] {
    turn.abandon();
    CHECK(turn.wait_while(State::kGone, deadline()) == State::kFree);
    before = State::kFree;
  };
  for (std::int32_t i = 0; i < 40; ++i) {
    std::fill(numbers, numbers + 2 * (kUnrollLength + 1), 1000 * host + i);
    CHECK(turn.pass(before, State::kAgent));
    if (i % 7 == 3) {  // While its rollout is unread, being copied, or waiting in the queue.
      die();
      continue;
    }
    CHECK(turn.wait_while(State::kAgent, deadline()) == State::kEnvironment);
    before = State::kEnvironment;
    numbers[0] = -1;
    if (i % 11 == 5) die();  // While it writes the next rollout.
  }
  turn.abandon();
}

TEST_CASE("rollouts of many lanes are whole and in order, whenever those who bring them die") {
  std::int64_t room = 0;
  SUBCASE("in a queue with room for a batch") { room = 3; }
  SUBCASE("in a queue whose producers wait for the learner") { room = 0; }
  BatchingQueue queue({1, 3, 3, {}, room});
  DynamicBatcher batcher({1, 1, 64, 10, {}});
  ActorPool pool(kUnrollLength, queue, batcher, tuple_of({}));
  std::int64_t num_rollouts = 0;
  std::thread learner([&] {
    Values newest(4, -1);
    while (const auto batch = queue.dequeue()) {
      const Values numbers = values(batch->leaves[0]);
      for (std::size_t column = 0; column < 3; ++column, ++num_rollouts) {
        const std::int32_t number = numbers[column];
        for (std::size_t i = column; i < numbers.size(); i += 3) CHECK(numbers[i] == number);
        std::int32_t& last = newest[static_cast<std::size_t>(number / 1000)];
        CHECK(number % 1000 >= last);
        last = number % 1000;
      }
    }
  });
  std::vector<std::thread> hosts;
  for (std::int32_t host = 0; host < 4; ++host) {
    hosts.emplace_back([&pool, host] { bring_rollouts(pool, host); });
  }
  for (std::thread& host : hosts) host.join();
  queue.close();
  batcher.close();
  pool.run();
  learner.join();
  CHECK(num_rollouts > 4 * 2 * 30);
}

TEST_CASE("a pool without environments ends, too") {
  System system(1);
  Environments nobody(1);
  system.pool.add_lane(nobody.lane());
  std::thread closing([&] { system.batcher.close(); });
  system.pool.run();
  closing.join();
  CHECK(nobody.lane().turn.state() == State::kClosed);
}

}  // namespace torchbeast
