// Collects rollouts for the learner: takes nests of rows, and hands out batches of these rows.
//
// actors -> enqueue() -> rows waiting -> dequeue(): concatenated along batch_dim -> learner
//
// A rollout belongs to the client whose environments played it. Clients with rollouts waiting get
// equal shares of each batch, so that no client can occupy the learner, however many it sends.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "array_nest.h"
#include "buffer_pool.h"
#include "row_queue.h"

namespace torchbeast {

// All methods may be called from any thread.
class BatchingQueue {
  struct Item {
    ArrayNest nest;
    std::int64_t num_rows;
    std::int64_t client;
    bool given;
  };

 public:
  using Member = RowQueue<Item>::Member;  // See row_queue.h.

  explicit BatchingQueue(const QueueOptions& options) : queue_(options) {}

  // Keeps the nest's memory alive and reads it when a batch is assembled. Waits while the queue is
  // full; throws ClosedBatchingQueue once it is closed.
  void enqueue(ArrayNest nest, const Poll& poll = {});

  // As enqueue(), for memory that no other code uses any more: an item that makes up a whole batch
  // is handed out without a copy. For member and patience, see row_queue.h.
  void give(ArrayNest nest, const Poll& poll = {}, std::int64_t client = 0,
            Member* member = nullptr, Clock::duration patience = {});

  // Between join() and leave() a member gives items, one after the other.
  void join(Member& member) { queue_.join(member); }
  void leave(Member& member) { queue_.leave(member); }

  // Client and number of rows of each member.
  std::vector<std::pair<std::int64_t, std::int64_t>> members() const { return queue_.members(); }

  // Changes these QueueOptions; throws std::invalid_argument. See row_queue.h.
  void resize(std::int64_t minimum_batch_size, std::int64_t maximum_batch_size,
              std::optional<std::int64_t> maximum_queue_size) {
    queue_.resize(minimum_batch_size, maximum_batch_size, maximum_queue_size);
  }

  // Waits for the next batch; returns nothing once the queue is closed.
  std::optional<ArrayNest> dequeue(const Poll& poll = {});

  std::int64_t size() const { return queue_.num_rows(); }
  void close() { queue_.close(); }
  bool is_closed() const { return queue_.is_closed(); }

 private:
  void push(ArrayNest nest, std::int64_t client, bool given, const Poll& poll, Member* member,
            Clock::duration patience);

  RowQueue<Item> queue_;
  BufferPool pool_;
};

}  // namespace torchbeast
