// Carries rows and actions between environments and agent, and rollouts to the learner.
//
//   lane: rows ──► DynamicBatcher: the agent ──► lane: actions
//           └────► rollout ── when full ──► BatchingQueue: the learner
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include "array_nest.h"
#include "batching_queue.h"
#include "buffer_pool.h"
#include "dynamic_batcher.h"
#include "process.h"
#include "turn.h"
#include "waiting.h"
#include "wakeup.h"

namespace torchbeast {

// Memory that a group of K environments shares with its actor.
struct Lane {
  Turn turn;
  ArrayNest row;       // [1, K, ...]; agent and learner get rows in the same containers.
  ArrayNest action;    // [1, K, ...]
  Wakeup wakeup = {};  // For environments that wait for many lanes at once.
  std::int64_t client =
      0;  // Who owns the environments: clients have equal shares of agent and learner.
  // True for actors elsewhere that carry the model: `row` is then a whole rollout of K
  // environments, ((rows, outputs), agent_state), [T+1, K, ...] and [L, K, ...], and `action` is
  // empty.
  bool has_rollouts = false;
  // Whether the environments' side knows the mark of Turn::take_rows(). Hosts of older versions do
  // not.
  bool marks_rows = true;

  // Passes the turn to the environments; false if it is not `from`.
  bool pass(Turn::State from, Turn::State to) const {
    if (!turn.pass(from, to)) return false;
    wakeup.notify();
    return true;
  }

  void close() const {
    turn.close();
    wakeup.notify();
  }
};

// Counts over all actors so far. Steps and rollouts are those of single environments: a lane of K
// environments adds K.
struct ActorCounts {
  std::atomic<std::int64_t> steps{0};
  std::atomic<std::int64_t> rollouts{0};          // Sent to the learner, ...
  std::atomic<std::int64_t> padded_rollouts{0};   // ... and of these, filled up by Rollout::pad().
  std::atomic<std::int64_t> dropped_rollouts{0};  // Left open, and not sent: no way to pad them.
  std::atomic<std::int64_t> ns_for_environments{0};  // Time spent waiting for ...
  std::atomic<std::int64_t> ns_for_agent{0};
  std::atomic<std::int64_t> ns_for_learner{0};
};

// One thread for each lane. Whole rollouts (Lane::has_rollouts) go to the learner as they are. For
// other lanes, the agent gets (row, agent_state) and answers (output, new_agent_state), where
// output is a dict with the key "action" or a tuple whose first element is the action. The learner
// gets ((rows, outputs), agent_state at row 0). The batch is dimension 1 of all arrays. Rows and
// outputs keep their containers.
class ActorPool {
 public:
  // The queues must outlive the pool. The initial state has a batch of one.
  ActorPool(std::int64_t unroll_length, BatchingQueue& learner_queue,
            DynamicBatcher& inference_batcher, ArrayNest initial_agent_state);

  // Ends all actors and waits for them.
  ~ActorPool();
  ActorPool(const ActorPool&) = delete;
  ActorPool& operator=(const ActorPool&) = delete;

  // Starts an actor for the lane. Environments may come and go on it; the actor ends when the lane
  // is closed. Throws std::invalid_argument if the lane's arrays are not [1, K, ...], or
  // [any, K, ...] if it has rollouts.
  void add_lane(Lane lane);

  // Waits until a queue or the pool is closed and the actors have ended. Throws the first exception
  // of an actor.
  void run(const Poll& poll = {});

  // Closes all lanes and ends all actors; returns at once.
  void close();

  // Closes, and waits for the actors to end. No lane can be added afterwards.
  void stop();

  std::int64_t num_actors() const;  // That have not ended.
  const ActorCounts& counts() const { return counts_; }

 private:
  class Seat;
  class Actor;
  class RolloutTaker;

  struct Running {
    Lane lane;
    std::thread thread;
    bool ended = false;
  };

  bool is_over() const;
  Turn::State wait_for_turn(const Lane& lane);
  void act(Running& running);
  void forget_ended();

  const Process process_;
  const std::int64_t unroll_length_;
  BatchingQueue& learner_queue_;
  DynamicBatcher& inference_batcher_;
  const ArrayNest initial_agent_state_;
  BufferPool pool_;
  ActorCounts counts_;
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;  // Guards the members below.
  Condition ended_;
  std::list<Running> running_;  // A list, because each thread keeps a reference to its element.
  std::int64_t num_actors_ = 0;
  std::exception_ptr error_;
};

}  // namespace torchbeast
