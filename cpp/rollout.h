// The rollout that an actor is filling for its lane: T+1 rows of K environments, in memory of the
// pool.
//
//   row:     what the environments returned  [T+1, K, ...]; a dict with the fields of
//            libtorchbeast/rows.py, or the tuple that TorchBeast's agents get
//   output:  what the agent returned         [T+1, K, ...]; output t led to row t
#pragma once

#include <cstdint>

#include "array_nest.h"
#include "buffer_pool.h"

namespace torchbeast {

// The K of rows [T, K, ...], which is that of any leaf; check_lane() makes sure that there is one.
inline std::int64_t num_envs_of(const ArrayNest& rows) { return rows.leaves.front().shape[1]; }

class Rollout {
 public:
  // The rows to come have the structure, dtypes and shapes of `row`, [1, K, ...].
  Rollout(const ArrayNest& row, std::int64_t unroll_length, BufferPool& pool);

  // Begins where another rollout ends: with its last row and output.
  Rollout(const Rollout& before, BufferPool& pool);

  std::int64_t num_rows() const { return num_rows_; }
  bool is_full() const { return num_rows_ > unroll_length_; }

  void add_row(const ArrayNest& row);

  // The output that led to the newest row. Throws std::invalid_argument if it is not [1, K, ...].
  void add_output(const ArrayNest& output, BufferPool& pool);

  ArrayNest newest_row() const { return rows_.slice(0, num_rows_ - 1, num_rows_); }

  // Pads the rollout with rows that are zero except for `done` and `truncated`: the transitions
  // into them did not happen. Returns false if there is no transition to keep, or if rows do not
  // have these two fields.
  bool pad();

  // (rows, outputs), for the learner.
  ArrayNest contents() const { return tuple_of_nests({rows_, outputs_}); }

 private:
  // Sets all bytes of the rows that were not added.
  void fill_rest(const ArrayNest& rows, int byte) const;

  std::int64_t unroll_length_;
  std::int64_t num_rows_ = 0;
  ArrayNest rows_;
  ArrayNest outputs_;  // Has no structure until the agent's first output is added.
};

}  // namespace torchbeast
