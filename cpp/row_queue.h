// The queue under BatchingQueue and DynamicBatcher: items of any number of rows go in, batches of
// bounded size come out. The items of one client come out in the order in which they went in.
// Clients with rows waiting get equal shares of each batch, or all their rows if these are fewer.
//
//   push(a, 3 rows), push(b, 2 rows)  ->  pop(): all of a, row 0 of b    (with a maximum of 4)
//                                         pop(): row 1 of b
//   a of client 0, b of client 1:     ->  pop(): rows 0, 1 of a, all of b
//                                         pop(): row 2 of a
//
// A full queue still takes items, but holds their producers back in push(). If it held the items
// back, one large item would keep all other clients out.
//
// With a maximum_queue_size of 0, producers do not run ahead of the consumers: a producer may go on
// when its item was taken and a consumer is back for the next batch. While a consumer waits for a
// batch, producers may go on sooner if the other members (see Member) that are at work are too few
// to fill the batch, or take longer than the producer's patience. Members that are late are not
// expected again until they bring an item.
//
// Sizes may change at any time: items that wait then go into batches of the new size.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "array_nest.h"
#include "concatenate.h"
#include "errors.h"
#include "waiting.h"

namespace torchbeast {

// All sizes count rows. All but batch_dim may change while the queue is in use.
struct QueueOptions {
  std::int64_t batch_dim = 1;
  std::int64_t minimum_batch_size = 1;
  std::int64_t maximum_batch_size = 1024;
  std::optional<std::int64_t> timeout_ms;          // None: waits for the minimum, however long.
  std::optional<std::int64_t> maximum_queue_size;  // None: no bound; 0: see above.

  void check() const;  // Throws std::invalid_argument.
};

// Rows of a nest along batch_dim; throws std::invalid_argument if its leaves can't be batched.
std::int64_t count_rows(const ArrayNest& nest, std::int64_t batch_dim);

// Item has at least the members `ArrayNest nest`, `std::int64_t num_rows` and `std::int64_t
// client`.
template <typename Item>
class RowQueue {
 public:
  // Rows [begin, end) of an item.
  struct Piece {
    std::shared_ptr<Item> item;
    std::int64_t begin;
    std::int64_t end;
  };

  static std::vector<Rows> rows_of(const std::vector<Piece>& pieces) {
    std::vector<Rows> rows;
    rows.reserve(pieces.size());
    for (const Piece& piece : pieces) rows.push_back({&piece.item->nest, piece.begin, piece.end});
    return rows;
  }

  explicit RowQueue(const QueueOptions& options)
      : batch_dim_(options.batch_dim), options_(options) {
    options_.check();
  }

  // A producer that makes items of num_rows rows, one after the other, from join() to leave().
  struct Member {
    std::int64_t num_rows;
    std::int64_t client = 0;
    bool is_expected = false;  // It is making its next item, and is not late.
  };

  void join(Member& member) {
    const std::lock_guard<std::mutex> lock(mutex_);
    members_.push_back(&member);
    expect(member, true);
  }

  void leave(Member& member) {
    const std::lock_guard<std::mutex> lock(mutex_);
    members_.remove(&member);
    expect(member, false);
    admit_producers();
  }

  // Client and number of rows of each current member.
  std::vector<std::pair<std::int64_t, std::int64_t>> members() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::pair<std::int64_t, std::int64_t>> result;
    for (const Member* member : members_) result.emplace_back(member->client, member->num_rows);
    return result;
  }

  // Changes the sizes, also for threads that already wait. A maximum_queue_size of 0 must stay 0,
  // and no other may become 0, because its producers wait for another condition.
  void resize(std::int64_t minimum_batch_size, std::int64_t maximum_batch_size,
              std::optional<std::int64_t> maximum_queue_size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    QueueOptions options = options_;
    options.minimum_batch_size = minimum_batch_size;
    options.maximum_batch_size = maximum_batch_size;
    options.maximum_queue_size = maximum_queue_size;
    options.check();
    if ((maximum_queue_size == 0) != (options_.maximum_queue_size == 0)) {
      throw std::invalid_argument("A queue of size 0 stays one, and no other becomes one");
    }
    if (options_.maximum_batch_size == 1 && maximum_batch_size > 1) check_fit_each_other();
    options_ = options;
    admit_producers();
    rows_.notify_all();
  }

  // Adds an item, and waits while the queue is full and no row of the item is taken. Throws if the
  // item cannot be in one batch with those that wait, or if the queue is closed.
  void push(std::shared_ptr<Item> item, const Poll& poll, Member* member = nullptr,
            Clock::duration patience = {}) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) throw ClosedBatchingQueue("Enqueue to closed queue");
    check_fits_others(*item);
    if (member) expect(*member, false);
    const std::int64_t client = item->client;
    const std::int64_t num_rows = item->num_rows;
    ClientQueue& queue = queues_[client];
    if (queue.empty()) turns_.push_back(client);
    const auto entry = queue.insert(queue.end(), Entry{std::move(item)});
    num_rows_ += num_rows;
    num_held_rows_ += num_rows;
    if (may_go_on(true)) {
      num_held_rows_ -= num_rows;
      if (member) expect(*member, true);
      lock.unlock();
      rows_.notify_one();
      return;
    }
    Producer producer;
    producer.member = member;
    hold(producer, *entry);
    rows_.notify_one();
    const auto is_over = [&] { return closed_ || producer.state == Producer::kReleased; };
    try {
      while (options_.maximum_queue_size == 0 && producer.is_patient &&
             !wait(producer.released, lock, Clock::now() + std::max(patience, kMinPatience), poll,
                   is_over)) {
        if (num_consumers_waiting_ > 0) time_out(producer);
      }
      wait(producer.released, lock, {}, poll, is_over);
    } catch (...) {
      lock.lock();
      if (!closed_ && producer.state == Producer::kHeld) withdraw(client, entry);
      if (!closed_ && producer.state == Producer::kTaken) taken_.remove(&producer);
      throw;
    }
    if (producer.state != Producer::kReleased) throw ClosedBatchingQueue("Enqueue to closed queue");
  }

  // Waits for a batch; the timeout begins when there is at least one row. Empty if closed.
  std::vector<Piece> pop(const Poll& poll) {
    std::unique_lock<std::mutex> lock(mutex_);
    {
      const Counted waiting(num_consumers_waiting_);
      for (Producer* producer : taken_) release(*producer);
      taken_.clear();
      admit_producers();
      do {
        wait(rows_, lock, {}, poll, [this] { return closed_ || num_rows_ > 0; });
        wait(rows_, lock, deadline(), poll,
             [this] { return closed_ || num_rows_ >= options_.minimum_batch_size; });
      } while (!closed_ && num_rows_ == 0);  // Another consumer was faster.
    }
    std::vector<Piece> pieces = take(options_.maximum_batch_size);
    admit_producers();
    if (num_rows_ > 0) rows_.notify_one();
    return pieces;
  }

  // The rows that wait, without those of producers that are held back.
  std::int64_t num_rows() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_rows_ - num_held_rows_;
  }

  // Drops the items in the queue and wakes all threads that wait.
  void close() {
    std::unordered_map<std::int64_t, ClientQueue>
        dropped;  // Destroyed after the lock is released, as it may take a while.
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("Queue was closed already");
    closed_ = true;
    num_rows_ = num_held_rows_ = 0;
    queues_.swap(dropped);
    turns_.clear();
    for (auto* producers : {&producers_, &taken_}) {
      for (Producer* producer : *producers) producer->released.notify_one();
      producers->clear();
    }
    rows_.notify_all();
  }

  bool is_closed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_;
  }

  std::int64_t batch_dim() const { return batch_dim_; }

 private:
  static constexpr Clock::duration kMinPatience = 2 * kPollInterval;  // With less, no poll.

  struct Entry;

  // Adds one to a count while it lives.
  class Counted {
   public:
    explicit Counted(std::atomic<std::int64_t>& count) : count_(count) { ++count_; }
    ~Counted() { --count_; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

   private:
    std::atomic<std::int64_t>& count_;
  };

  // A thread that is held back in push().
  struct Producer {
    enum State { kHeld, kTaken, kReleased };  // kTaken: its item is (in a queue of size 0).
    Condition released;
    State state = kHeld;
    bool is_patient = true;
    Entry* entry = nullptr;  // Valid while it is held.
    Member* member = nullptr;
  };

  struct Entry {
    std::shared_ptr<Item> item;
    std::int64_t num_taken = 0;  // Rows that are in earlier batches.
    std::optional<typename std::list<Producer*>::iterator> producer = {};  // If held back.
  };

  using ClientQueue = std::list<Entry>;  // The waiting items of one client, the oldest first.

  // Whether a producer may go on although no row of its item is taken.
  bool may_go_on(bool is_patient) const {
    if (!options_.maximum_queue_size) return true;
    if (*options_.maximum_queue_size > 0)
      return num_rows_ - num_held_rows_ < *options_.maximum_queue_size;
    const std::int64_t wanted = options_.minimum_batch_size;
    return num_consumers_waiting_ > 0 && num_rows_ < wanted &&
           (num_rows_ + num_expected_rows_ < wanted || !is_patient);
  }

  void expect(Member& member, bool is_expected) {
    if (member.is_expected == is_expected) return;
    member.is_expected = is_expected;
    num_expected_rows_ += is_expected ? member.num_rows : -member.num_rows;
  }

  // The producer's patience is over. No producer waits any longer for the members that are late.
  void time_out(Producer& producer) {
    producer.is_patient = false;
    for (Member* late : members_) expect(*late, false);
    admit_producers();
  }

  void release(Producer& producer) {
    producer.state = Producer::kReleased;
    if (producer.member) expect(*producer.member, true);
    producer.released.notify_one();
  }

  void hold(Producer& producer, Entry& entry) {
    producer.entry = &entry;
    entry.producer = producers_.insert(producers_.end(), &producer);
  }

  Producer& let_go(Entry& entry) {
    Producer& producer = ***entry.producer;
    producers_.erase(*entry.producer);
    entry.producer.reset();
    num_held_rows_ -= entry.item->num_rows;
    return producer;
  }

  void admit_producers() {
    for (auto next = producers_.begin(); next != producers_.end();) {
      Producer& producer = **next++;
      if (may_go_on(producer.is_patient)) release(let_go(*producer.entry));
    }
  }

  // Called when the first rows of the item go into a batch.
  void note_taken(Entry& entry) {
    Producer& producer = let_go(entry);
    if (options_.maximum_queue_size != 0) {
      release(producer);
      return;
    }
    producer.state = Producer::kTaken;
    taken_.push_back(&producer);
  }

  // Removes an item whose producer has stopped waiting, because its poll has thrown.
  void withdraw(std::int64_t client, typename ClientQueue::iterator entry) {
    let_go(*entry);
    num_rows_ -= entry->item->num_rows;
    ClientQueue& queue = queues_.at(client);
    queue.erase(entry);
    if (!queue.empty()) return;
    queues_.erase(client);
    turns_.erase(std::find(turns_.begin(), turns_.end(), client));
  }

  std::optional<Clock::time_point> deadline() const {
    if (!options_.timeout_ms) return {};
    constexpr std::int64_t kDecades = 1'000'000'000'000;  // Keeps the sum within the clock's range.
    return Clock::now() + std::chrono::milliseconds(std::min(*options_.timeout_ms, kDecades));
  }

  // Checked in push(), so that the producer at fault gets the error, not the consumer that would
  // assemble the batch. Batches of one row never mix items.
  void check_fits_others(const Item& item) const {
    if (turns_.empty() || options_.maximum_batch_size == 1) return;
    check_fits(item.nest, queues_.at(turns_.front()).back().item->nest, batch_dim_);
  }

  void check_fit_each_other() const {
    if (turns_.empty()) return;
    const ArrayNest& first = queues_.at(turns_.front()).front().item->nest;
    for (const auto& [client, queue] : queues_) {
      for (const Entry& entry : queue) check_fits(entry.item->nest, first, batch_dim_);
    }
  }

  // Takes rows in rounds: each client in turn gets an equal share of the places that are left,
  // until there are no places or no rows.
  std::vector<Piece> take(std::int64_t maximum) {
    std::vector<Piece> pieces;
    while (maximum > 0 && !turns_.empty()) {
      const auto num_clients = static_cast<std::int64_t>(turns_.size());
      const std::int64_t share = std::max<std::int64_t>(1, maximum / num_clients);
      for (std::int64_t i = 0; i < num_clients && maximum > 0; ++i) {
        const std::int64_t client = turns_.front();
        turns_.pop_front();
        ClientQueue& queue = queues_.at(client);
        maximum -= take_from(queue, share, pieces);
        if (queue.empty()) {
          queues_.erase(client);
        } else {
          turns_.push_back(client);
        }
      }
    }
    return pieces;
  }

  // Returns the number of rows that it took.
  std::int64_t take_from(ClientQueue& queue, std::int64_t maximum, std::vector<Piece>& pieces) {
    std::int64_t taken = 0;
    while (taken < maximum && !queue.empty()) {
      Entry& entry = queue.front();
      if (entry.producer) note_taken(entry);
      const std::int64_t begin = entry.num_taken;
      const std::int64_t end = std::min(entry.item->num_rows, begin + maximum - taken);
      pieces.push_back({entry.item, begin, end});
      entry.num_taken = end;
      if (end == entry.item->num_rows) queue.pop_front();
      taken += end - begin;
    }
    num_rows_ -= taken;
    return taken;
  }

  const std::int64_t batch_dim_;
  mutable std::mutex mutex_;
  QueueOptions options_;
  Condition rows_;                                        // For consumers.
  std::unordered_map<std::int64_t, ClientQueue> queues_;  // Of each client that has rows waiting.
  std::deque<std::int64_t> turns_;  // These clients, in the order of their turns.
  std::list<Producer*> producers_;  // Those that are held back, the oldest first.
  std::list<Producer*> taken_;      // Those whose items are in batches that consumers work on.
  std::int64_t num_rows_ = 0;       // Rows that wait; ...
  std::int64_t num_held_rows_ = 0;  // ... of these, those whose producers are held back.
  std::list<Member*> members_;
  std::int64_t num_expected_rows_ = 0;                  // Of the members that are expected.
  std::atomic<std::int64_t> num_consumers_waiting_{0};  // Atomic: poll() throws without the lock.
  bool closed_ = false;
};

}  // namespace torchbeast
