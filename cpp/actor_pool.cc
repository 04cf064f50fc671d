#include "actor_pool.h"

#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "action.h"
#include "concatenate.h"
#include "errors.h"
#include "rollout.h"

namespace torchbeast {
namespace {

// How soon an actor whose environments are silent sees that a queue was closed.
constexpr std::chrono::milliseconds kLookAround{200};

// How much longer than its own an actor lets others' rollouts take before it goes on without them:
// on a busy machine processes stand still for a moment.
constexpr std::chrono::seconds kPatience{1};

// Adds the time that it lives.
class Timer {
 public:
  explicit Timer(std::atomic<std::int64_t>& total) : total_(total), start_(Clock::now()) {}
  ~Timer() {
    total_ += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  std::atomic<std::int64_t>& total_;
  const Clock::time_point start_;
};

// The learner's queue may count on rollouts while it lives.
class Membership {
 public:
  Membership(BatchingQueue& queue, BatchingQueue::Member& member) : queue_(queue), member_(member) {
    queue_.join(member_);
  }
  ~Membership() { queue_.leave(member_); }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

 private:
  BatchingQueue& queue_;
  BatchingQueue::Member& member_;
};

// One row of agent state, seen as num_envs equal ones.
ArrayNest repeat(const ArrayNest& state, std::int64_t num_envs) {
  ArrayNest result = state;
  for (Array& leaf : result.leaves) {
    leaf.shape[1] = num_envs;
    leaf.strides[1] = 0;
  }
  return result;
}

void check_initial_state(const ArrayNest& state) {
  for (const Array& leaf : state.leaves) {
    if (leaf.ndim() < 2 || leaf.shape[1] != 1) {
      throw std::invalid_argument(
          "The initial agent state must have a batch of one in dimension 1, got " +
          to_string(leaf.shape));
    }
  }
}

void check_lane(const Lane& lane) {
  if (lane.row.leaves.empty())
    throw std::invalid_argument("A lane's row must hold arrays, got none");
  std::optional<std::int64_t> num_envs;
  for (const ArrayNest* nest : {&lane.row, &lane.action}) {
    for (const Array& leaf : nest->leaves) {
      if (leaf.ndim() >= 2 && !num_envs) num_envs = leaf.shape[1];
      const bool is_row = leaf.ndim() >= 2 && (leaf.shape[0] == 1 || lane.has_rollouts);
      if (!is_row || leaf.shape[1] != num_envs) {
        const std::string shape = lane.has_rollouts ? "[N, K, ...]" : "[1, K, ...]";
        throw std::invalid_argument(
            "A lane's arrays must be " + shape + " with the same number K of environments, got " +
            to_string(leaf.shape) + (num_envs ? " with K = " + std::to_string(*num_envs) : ""));
      }
    }
  }
}

ArrayNest copy_of(const ArrayNest& nest, BufferPool& pool) {
  ArrayNest result{nest.structure, {}};
  result.leaves.reserve(nest.leaves.size());
  for (const Array& leaf : nest.leaves) {
    result.leaves.push_back(allocate_like(leaf, 0, leaf.shape[0], pool));
    copy(leaf, result.leaves.back());
  }
  return result;
}

}  // namespace

// The life of one actor: it waits for environments, plays with them until they are gone, and waits
// for the next.
class ActorPool::Actor {
 public:
  Actor(ActorPool& pool, const Lane& lane)
      : pool_(pool),
        lane_(lane),
        num_envs_(num_envs_of(lane.row)),
        member_{num_envs_, lane.client} {}

  void run() {
    while (wait_for_rows()) {
      play();
      lane_.pass(Turn::kGone, Turn::kFree);
    }
  }

 private:
  // From the first row to the last. A row is kept while the agent looks at it; only the last of a
  // rollout is kept before: the learner may be busy, and the agent's next weights should be new.
  void play() {
    const Membership membership(pool_.learner_queue_, member_);
    state_ = state_at_start_ = repeat(pool_.initial_agent_state_, num_envs_);
    started_ = Clock::now();
    rollout_.emplace(lane_.row, pool_.unroll_length_, pool_.pool_);
    ArrayNest output = ask_agent([this] { rollout_->add_row(lane_.row); });
    while (lane_.pass(Turn::kAgent, Turn::kEnvironment) && wait_for_rows()) {
      if (rollout_->num_rows() < pool_.unroll_length_) {
        output = ask_agent([this, &output] { keep_row(output); });
      } else {
        keep_row(output);
        send_full();
        output = ask_agent({});
      }
    }
    finish();
  }

  // The lane's row, and the output that led to it.
  void keep_row(const ArrayNest& output) {
    rollout_->add_row(lane_.row);
    rollout_->add_output(output, pool_.pool_);
    pool_.counts_.steps += num_envs_;
  }

  void send_full() {
    const Rollout full = std::move(*rollout_);
    rollout_.emplace(full, pool_.pool_);
    send(full);
    state_at_start_ = state_;
    started_ = Clock::now();
  }

  // Whether there are rows to read; else the environments are gone or all is over.
  bool wait_for_rows() {
    while (pool_.wait_for_turn(lane_) != Turn::kAgent) {
      if (rollout_) return false;
      lane_.pass(Turn::kGone, Turn::kFree);
    }
    return true;
  }

  // Shows the lane's row, writes the action to the lane and returns the output.
  ArrayNest ask_agent(const std::function<void()>& meanwhile) {
    std::vector<ArrayNest> answer;
    {
      const Timer timer(pool_.counts_.ns_for_agent);
      answer = children(pool_.inference_batcher_.compute(tuple_of_nests({lane_.row, state_}), poll_,
                                                         meanwhile, lane_.client));
    }
    if (answer.size() != 2) {
      throw std::invalid_argument("The agent must answer (output, new_agent_state), got " +
                                  std::to_string(answer.size()) + " elements");
    }
    write_action(action_of(answer[0]), lane_.action);
    state_ = std::move(answer[1]);
    return std::move(answer[0]);
  }

  void send(const Rollout& rollout) {
    const Timer timer(pool_.counts_.ns_for_learner);
    // Others that take as long again for their rollouts are waited for.
    pool_.learner_queue_.give(tuple_of_nests({rollout.contents(), state_at_start_}), poll_,
                              lane_.client, &member_, Clock::now() - started_ + kPatience);
    pool_.counts_.rollouts += num_envs_;
  }

  // What the environments left behind.
  void finish() {
    if (rollout_->pad()) {
      send(*rollout_);
      pool_.counts_.padded_rollouts += num_envs_;
    } else if (rollout_->num_rows() > 1) {
      pool_.counts_.dropped_rollouts += num_envs_;
    }
    rollout_.reset();
  }

  ActorPool& pool_;
  const Lane& lane_;
  const std::int64_t num_envs_;
  BatchingQueue::Member member_;
  ArrayNest state_;
  ArrayNest state_at_start_;   // Of the rollout, before the agent saw its first row.
  Clock::time_point started_;  // The rollout.
  std::optional<Rollout> rollout_;
  const Poll poll_ = [this] {
    if (pool_.is_over()) throw ClosedBatchingQueue("The pool was closed");
  };
};

// Takes rollouts from a lane. Who brought one may bring the next when the learner's queue has room
// for it: what waits is bounded, and with a queue of size 0 the rollout has been learnt from.
class ActorPool::RolloutTaker {
 public:
  RolloutTaker(ActorPool& pool, const Lane& lane)
      : pool_(pool),
        lane_(lane),
        num_envs_(num_envs_of(lane.row)),
        member_{num_envs_, lane.client} {}

  void run() {
    for (;;) {
      if (pool_.wait_for_turn(lane_) == Turn::kAgent) take_until_gone();
      lane_.pass(Turn::kGone, Turn::kFree);
    }
  }

 private:
  void take_until_gone() {
    const Membership membership(pool_.learner_queue_, member_);
    Clock::time_point started = Clock::now();
    do {
      take(Clock::now() - started + kPatience);
      started = Clock::now();
    } while (lane_.pass(Turn::kAgent, Turn::kEnvironment) &&
             pool_.wait_for_turn(lane_) == Turn::kAgent);
  }

  void take(Clock::duration patience) {
    ArrayNest rollout = copy_of(lane_.row, pool_.pool_);
    pool_.counts_.steps += pool_.unroll_length_ * num_envs_;
    const Timer timer(pool_.counts_.ns_for_learner);
    pool_.learner_queue_.give(std::move(rollout), poll_, lane_.client, &member_, patience);
    pool_.counts_.rollouts += num_envs_;
  }

  ActorPool& pool_;
  const Lane& lane_;
  const std::int64_t num_envs_;
  BatchingQueue::Member member_;
  const Poll poll_ = [this] {
    if (pool_.is_over()) throw ClosedBatchingQueue("The pool was closed");
  };
};

ActorPool::ActorPool(std::int64_t unroll_length, BatchingQueue& learner_queue,
                     DynamicBatcher& inference_batcher, ArrayNest initial_agent_state)
    : unroll_length_(unroll_length),
      learner_queue_(learner_queue),
      inference_batcher_(inference_batcher),
      initial_agent_state_(std::move(initial_agent_state)) {
  if (unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be at least 1, got " +
                                std::to_string(unroll_length));
  }
  check_initial_state(initial_agent_state_);
}

ActorPool::~ActorPool() { stop(); }

void ActorPool::stop() {
  if (!process_.is_here()) {  // A fork: threads and lanes are the parent's, and stay as they are.
    new std::list<Running>(std::move(running_));
    return;
  }
  close();  // Nobody adds a thread from here on.
  for (Running& running : running_) {
    if (running.thread.joinable()) running.thread.join();
  }
}

void ActorPool::add_lane(Lane lane) {
  check_lane(lane);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_over()) {
    lane.close();
    return;
  }
  forget_ended();
  Running& running = running_.emplace_back(Running{std::move(lane), {}});
  try {
    // It ends no sooner than we let go of the lock.
    running.thread = std::thread([this, &running] { act(running); });
  } catch (...) {
    running_.pop_back();
    throw;
  }
  ++num_actors_;
}

// Lanes come and go with environments from elsewhere: nothing of those that are closed may stay.
void ActorPool::forget_ended() {
  running_.remove_if([](Running& running) {
    if (running.ended) running.thread.join();
    return running.ended;
  });
}

void ActorPool::act(Running& running) {
  std::exception_ptr error;
  try {
    if (running.lane.has_rollouts) {
      RolloutTaker(*this, running.lane).run();
    } else {
      Actor(*this, running.lane).run();
    }
  } catch (const ClosedBatchingQueue&) {  // The regular end.
  } catch (...) {
    error = std::current_exception();
  }
  running.lane.close();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (error && !error_) error_ = error;
  --num_actors_;
  running.ended = true;
  ended_.notify_all();
}

// Until there is something to read, kAgent, or who wrote it is gone, kGone.
Turn::State ActorPool::wait_for_turn(const Lane& lane) {
  const Timer timer(counts_.ns_for_environments);
  for (;;) {
    const Turn::State state =
        lane.turn.wait_while(Turn::kFree, Turn::kEnvironment, Clock::now() + kLookAround);
    if (state == Turn::kClosed || is_over()) {
      throw ClosedBatchingQueue("The lane or a queue was closed");
    }
    if (state == Turn::kAgent || state == Turn::kGone) return state;
  }
}

bool ActorPool::is_over() const {
  return closed_ || learner_queue_.is_closed() || inference_batcher_.is_closed();
}

void ActorPool::run(const Poll& poll) {
  std::unique_lock<std::mutex> lock(mutex_);
  // In slices: closing a queue wakes nobody here.
  while (!error_ && !(is_over() && num_actors_ == 0)) {
    wait(ended_, lock, Clock::now() + kLookAround, poll,
         [this] { return error_ || (is_over() && num_actors_ == 0); });
  }
  if (error_) std::rethrow_exception(error_);
}

void ActorPool::close() {
  closed_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Running& running : running_) running.lane.close();
}

std::int64_t ActorPool::num_actors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_actors_;
}

}  // namespace torchbeast
