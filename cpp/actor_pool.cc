#include "actor_pool.h"

#include <atomic>
#include <chrono>
#include <memory>
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

// How often an actor that waits for its environments checks whether a queue was closed.
constexpr std::chrono::milliseconds kLookAround{200};

// How much longer than an actor's own rollout those of others may take before it goes on without
// them: on a busy machine, processes stall for a moment.
constexpr std::chrono::seconds kPatience{1};

void add(Clock::duration time, std::atomic<std::int64_t>& total_ns) {
  total_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

// Adds its lifetime to a total.
class Timer {
 public:
  explicit Timer(std::atomic<std::int64_t>& total) : total_(total), start_(Clock::now()) {}
  ~Timer() { add(Clock::now() - start_, total_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  std::atomic<std::int64_t>& total_;
  const Clock::time_point start_;
};

// While it lives, the learner's queue expects rollouts from the member.
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

// A view of one row of agent state as num_envs equal rows.
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

}  // namespace

// The actor's end of a lane. Environments come and go at the other end.
class ActorPool::Seat {
 protected:
  Seat(ActorPool& pool, const Lane& lane)
      : pool_(pool),
        lane_(lane),
        num_envs_(num_envs_of(lane.row)),
        member_{num_envs_, lane.client} {}

  Turn::State wait_for_environments() {
    const Timer timer(pool_.counts_.ns_for_environments);
    return pool_.wait_for_turn(lane_);
  }

  // Calls `play` when there are environments, until the pool is closed.
  template <typename Play>
  void run(const Play& play) {
    for (;;) {
      if (wait_for_environments() == Turn::kAgent) play();
      lane_.pass(Turn::kGone, Turn::kFree);
    }
  }

  ActorPool& pool_;
  const Lane& lane_;
  const std::int64_t num_envs_;
  BatchingQueue::Member member_;
  const Poll poll_ = [this] {
    if (pool_.is_over()) throw ClosedBatchingQueue("The pool was closed");
  };
};

// The life of one actor: it waits for environments, plays with them until they are gone, and waits
// for the next.
class ActorPool::Actor : Seat {
 public:
  Actor(ActorPool& pool, const Lane& lane) : Seat(pool, lane) {}

  void run() {
    Seat::run([this] { play(); });
  }

 private:
  // Plays from the environments' first row to their last. A row is copied into the rollout while
  // the agent computes the actions. Only the last row of a rollout is copied before that, and the
  // rollout sent: this may wait for the learner, and the agent should then use its new weights.
  void play() {
    const Membership membership(pool_.learner_queue_, member_);
    state_ = state_at_start_ = repeat(pool_.initial_agent_state_, num_envs_);
    started_ = Clock::now();
    rollout_.emplace(lane_.row, pool_.unroll_length_, pool_.pool_);
    ask_agent();
    rollout_->add_row(lane_.row);
    let_go();
    while (wait_for_next_rows() == Turn::kAgent) {
      const ArrayNest output = take_answer();
      if (rollout_->num_rows() < pool_.unroll_length_) {
        ask_agent();
        keep_row(output);
      } else {
        keep_row(output);
        send_full();
        ask_agent();
      }
      let_go();
    }
    take_answer();  // The agent may still be reading the last row.
    finish();
  }

  // Rows that are not marked as taken look like new ones until the agent has answered.
  Turn::State wait_for_next_rows() {
    if (!lane_.marks_rows) call_->wait(poll_);
    return pool_.wait_for_turn(lane_);
  }

  // Copies the lane's row, and the output that led to it, into the rollout.
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

  // Sends the lane's row to the agent. Afterwards reply() and this thread call let_go(), once the
  // actions are written and the row is copied; the second call passes the turn.
  void ask_agent() {
    if (lane_.marks_rows) lane_.turn.take_rows();
    num_holding_ = 2;
    asked_ = Clock::now();
    call_ = pool_.inference_batcher_.call(
        tuple_of_nests({lane_.row, state_}), poll_,
        [this](const ArrayNest* answer) { reply(answer); }, lane_.client);
  }

  // Writes the actions. Called in the thread that answers, so that the actor's need not wake up.
  void reply(const ArrayNest* answer) {
    if (answer == nullptr) {
      lane_.turn.abandon();  // take_answer() throws the reason.
      return;
    }
    const std::vector<ArrayNest> parts = children(*answer);
    if (parts.size() != 2) {
      throw std::invalid_argument("The agent must answer (output, new_agent_state), got " +
                                  std::to_string(parts.size()) + " elements");
    }
    write_action(action_of(parts[0]), lane_.action);
    let_go();
  }

  void let_go() {
    if (--num_holding_ == 0) lane_.pass(Turn::kAgent, Turn::kEnvironment);
  }

  // Waits for the answer, keeps the new agent state, returns the output. Throws without an answer.
  ArrayNest take_answer() {
    std::vector<ArrayNest> answer = children(call_->get(poll_));
    const Clock::time_point answered = call_->answered_at();
    call_.reset();
    add(answered - asked_, pool_.counts_.ns_for_agent);
    add(Clock::now() - answered, pool_.counts_.ns_for_environments);
    state_ = std::move(answer[1]);
    return std::move(answer[0]);
  }

  void send(const Rollout& rollout) {
    const Timer timer(pool_.counts_.ns_for_learner);
    // Waits for others for as long as this rollout took, and kPatience more.
    pool_.learner_queue_.give(tuple_of_nests({rollout.contents(), state_at_start_}), poll_,
                              lane_.client, &member_, Clock::now() - started_ + kPatience);
    pool_.counts_.rollouts += num_envs_;
  }

  // Pads and sends, or drops, the open rollout of environments that are gone.
  void finish() {
    if (rollout_->pad()) {
      send(*rollout_);
      pool_.counts_.padded_rollouts += num_envs_;
    } else if (rollout_->num_rows() > 1) {
      pool_.counts_.dropped_rollouts += num_envs_;
    }
    rollout_.reset();
  }

  ArrayNest state_;
  ArrayNest state_at_start_;   // Of the rollout, before the agent saw its first row.
  Clock::time_point started_;  // When the rollout began.
  std::optional<Rollout> rollout_;
  Clock::time_point asked_;
  std::atomic<int> num_holding_{0};             // Users of the lane's row: agent, this thread.
  std::unique_ptr<DynamicBatcher::Call> call_;  // Destroyed first: until then it may call reply().
};

// Takes whole rollouts from a lane. The turn goes back when the learner's queue has room for more:
// so a bounded number waits, and with a queue of size 0 the rollout has been learnt from by then.
class ActorPool::RolloutTaker : Seat {
 public:
  RolloutTaker(ActorPool& pool, const Lane& lane) : Seat(pool, lane) {}

  void run() {
    Seat::run([this] { take_until_gone(); });
  }

 private:
  void take_until_gone() {
    const Membership membership(pool_.learner_queue_, member_);
    Clock::time_point started = Clock::now();
    do {
      take(Clock::now() - started + kPatience);
      started = Clock::now();
    } while (lane_.pass(Turn::kAgent, Turn::kEnvironment) &&
             wait_for_environments() == Turn::kAgent);
  }

  void take(Clock::duration patience) {
    ArrayNest rollout = concatenate({{&lane_.row, 0, num_envs_}}, 1, pool_.pool_);
    pool_.counts_.steps += pool_.unroll_length_ * num_envs_;
    const Timer timer(pool_.counts_.ns_for_learner);
    pool_.learner_queue_.give(std::move(rollout), poll_, lane_.client, &member_, patience);
    pool_.counts_.rollouts += num_envs_;
  }
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
  close();  // No thread is added from here on.
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
    // act() cannot end before this function releases the lock.
    running.thread = std::thread([this, &running] { act(running); });
  } catch (...) {
    running_.pop_back();
    throw;
  }
  ++num_actors_;
}

// Frees what belongs to lanes that are closed, as lanes come and go with remote environments.
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

// Waits until there are rows to take (kAgent) or the environments are gone (kGone).
Turn::State ActorPool::wait_for_turn(const Lane& lane) {
  for (;;) {
    const std::optional<Turn::State> state = lane.turn.wait_for_rows(Clock::now() + kLookAround);
    if (state == Turn::kClosed || is_over()) {
      throw ClosedBatchingQueue("The lane or a queue was closed");
    }
    if (state) return *state;
  }
}

bool ActorPool::is_over() const {
  return closed_ || learner_queue_.is_closed() || inference_batcher_.is_closed();
}

void ActorPool::run(const Poll& poll) {
  std::unique_lock<std::mutex> lock(mutex_);
  // In slices, because closing a queue does not notify ended_.
  while (!error_ && !(is_over() && num_actors_ == 0)) {
    if (!is_over()) forget_ended();  // After that stop() joins the threads.
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
