#include "rollout.h"

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "concatenate.h"

namespace torchbeast {
namespace {

ArrayNest allocate_rows(const ArrayNest& like, std::int64_t num_rows, BufferPool& pool) {
  ArrayNest result{like.structure, {}};
  result.leaves.reserve(like.leaves.size());
  for (const Array& leaf : like.leaves) {
    result.leaves.push_back(allocate_like(leaf, 0, num_rows, pool));
  }
  return result;
}

void copy_row(const ArrayNest& row, const ArrayNest& rows, std::int64_t t) {
  for (std::size_t i = 0; i < rows.leaves.size(); ++i) {
    copy(row.leaves[i], rows.leaves[i].slice(0, t, t + 1));
  }
}

// Sets all bytes of some rows; memory of the pool has no gaps.
void fill(const Array& rows, int byte) { std::memset(rows.data, byte, rows.num_bytes()); }

}  // namespace

Rollout::Rollout(const ArrayNest& row, std::int64_t unroll_length, BufferPool& pool)
    : unroll_length_(unroll_length), rows_(allocate_rows(row, unroll_length + 1, pool)) {}

Rollout::Rollout(const Rollout& before, BufferPool& pool)
    : Rollout(before.rows_, before.unroll_length_, pool) {
  add_row(before.newest_row());
  outputs_ = allocate_rows(before.outputs_, unroll_length_ + 1, pool);
  copy_row(before.outputs_.slice(0, unroll_length_, unroll_length_ + 1), outputs_, 0);
}

void Rollout::add_row(const ArrayNest& row) { copy_row(row, rows_, num_rows_++); }

void Rollout::add_output(const ArrayNest& output, BufferPool& pool) {
  if (!outputs_.structure) {
    outputs_ = allocate_rows(output, unroll_length_ + 1, pool);
    for (const Array& leaf : outputs_.leaves) fill(leaf.slice(0, 0, 1), 0);  // None led to row 0.
  }
  const std::int64_t num_envs = num_envs_of(rows_);
  for (const Array& leaf : output.leaves) {
    if (leaf.ndim() < 2 || leaf.shape[0] != 1 || leaf.shape[1] != num_envs) {
      throw std::invalid_argument("The agent's outputs must be [1, " + std::to_string(num_envs) +
                                  ", ...], one row for each environment, got " +
                                  to_string(leaf.shape));
    }
  }
  check_fits(output, outputs_, 0);
  copy_row(output, outputs_, num_rows_ - 1);
}

bool Rollout::pad() {
  const std::optional<ArrayNest> done = child_at(rows_, "done");
  const std::optional<ArrayNest> truncated = child_at(rows_, "truncated");
  if (num_rows_ < 2 || !done || !truncated) return false;
  fill_rest(rows_, 0);
  fill_rest(outputs_, 0);
  fill_rest(*done, 1);
  fill_rest(*truncated, 1);
  num_rows_ = unroll_length_ + 1;
  return true;
}

void Rollout::fill_rest(const ArrayNest& rows, int byte) const {
  for (const Array& leaf : rows.leaves) fill(leaf.slice(0, num_rows_, unroll_length_ + 1), byte);
}

}  // namespace torchbeast
