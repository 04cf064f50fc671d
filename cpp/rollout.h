// A rollout of one lane in the making: T+1 rows by K environments, in memory of the pool.
//
//   row:     what the environments said           [T+1, K, ...]
//   output:  what the agent had said to get there [T+1, K, ...]; output t led to row t
#pragma once

#include <cstddef>
#include <cstdint>

#include "array_nest.h"
#include "buffer_pool.h"

namespace torchbeast {

// A row is a tuple of at least the first five. Only rows with all of them can be padded.
enum RowField : std::size_t {
  kObservation = 0,
  kReward,
  kDone,
  kEpisodeStep,
  kEpisodeReturn,
  kTruncated,
  kLastAction,
};

class Rollout {
 public:
  // Rows will be like this one, [1, K, ...].
  Rollout(const ArrayNest& row, std::int64_t unroll_length, BufferPool& pool);

  // Begins where another one ends: its last row and output are the first here.
  Rollout(const Rollout& before, BufferPool& pool);

  std::int64_t num_rows() const { return num_rows_; }
  bool is_full() const { return num_rows_ > unroll_length_; }

  void add_row(const ArrayNest& row);

  // The output that led to the newest row. Throws std::invalid_argument if it is not [1, K, ...].
  void add_output(const ArrayNest& output, BufferPool& pool);

  ArrayNest newest_row() const { return rows_.slice(0, num_rows_ - 1, num_rows_); }

  // Fills the rest with rows that say: the transition into this row did not happen. False if there
  // is nothing worth keeping, or no way to say so.
  bool pad();

  // (rows, outputs), to give away.
  ArrayNest contents() const { return tuple_of_nests({rows_, outputs_}); }

 private:
  std::int64_t unroll_length_;
  std::int64_t num_rows_ = 0;
  ArrayNest rows_;
  ArrayNest outputs_;  // No structure: not known before the agent spoke for the first time.
};

}  // namespace torchbeast
