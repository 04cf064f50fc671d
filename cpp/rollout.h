// A rollout of one lane in the making: T+1 rows by K environments, in memory of the pool.
//
//   row:     what the environments said           [T+1, K, ...]; a dict with the fields of
//            libtorchbeast/rows.py, or the tuple that TorchBeast's agents get
//   output:  what the agent had said to get there [T+1, K, ...]; output t led to row t
#pragma once

#include <cstdint>

#include "array_nest.h"
#include "buffer_pool.h"

namespace torchbeast {

// K of a row or rows [T, K, ...]: all leaves have it, and there is at least one (check_lane()).
inline std::int64_t num_envs_of(const ArrayNest& rows) { return rows.leaves.front().shape[1]; }

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

  // Fills the rest with rows that say: the transition into this row did not happen. They are zero
  // but for `done` and `truncated`. False if there is nothing worth keeping, or if the row has no
  // such keys to say so.
  bool pad();

  // (rows, outputs), to give away.
  ArrayNest contents() const { return tuple_of_nests({rows_, outputs_}); }

 private:
  // Sets all bytes of the rows that were not added.
  void fill_rest(const ArrayNest& rows, int byte) const;

  std::int64_t unroll_length_;
  std::int64_t num_rows_ = 0;
  ArrayNest rows_;
  ArrayNest outputs_;  // No structure: not known before the agent spoke for the first time.
};

}  // namespace torchbeast
