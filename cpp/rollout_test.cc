#include "rollout.h"

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>

#include "testing.h"

namespace torchbeast {
namespace {

using Values = std::vector<std::int32_t>;
using Flags = std::vector<std::uint8_t>;

constexpr DType kBoolean{kBool, 8, 1}, kFloat32{kFloat, 32, 1};

// Rows of two environments in which nothing is zero; the frame is a nest.
ArrayNest make_row() {
  const Array flags = make_array_of<std::uint8_t>(kBoolean, {1, 2}, {1, 1});
  const Array floats = make_array_of<float>(kFloat32, {1, 2}, {0.5F, 0.5F});
  const Array frame = make_array({1, 2, 3}, Values(6, 7));
  return dict_of({{"frame", dict_of({{"done", leaf_of(frame)}, {"image", leaf_of(frame)}})},
                  {"reward", leaf_of(floats)},
                  {"done", leaf_of(flags)},
                  {"truncated", leaf_of(flags)},
                  {"episode_step", make_leaf({7, 7})},
                  {"episode_return", leaf_of(floats)},
                  {"last_action", make_leaf({7, 7})}});
}

ArrayNest rows_of(const Rollout& rollout) { return children(rollout.contents())[0]; }

}  // namespace

TEST_CASE("padding is zero but for the fields done and truncated") {
  BufferPool pool;
  Rollout rollout(make_row(), 3, pool);
  rollout.add_row(make_row());
  rollout.add_row(make_row());
  rollout.add_output(dict_of({{"action", make_leaf({5, 5})}}), pool);
  REQUIRE(rollout.pad());
  CHECK(rollout.is_full());

  const ArrayNest padding = rows_of(rollout).slice(0, 2, 4);
  for (const std::string key : {"done", "truncated"}) {
    CHECK(values_of<std::uint8_t>(child_at(padding, key)->leaves[0]) == Flags{1, 1, 1, 1});
  }
  for (const std::string key : {"reward", "episode_step", "episode_return", "last_action"}) {
    CHECK(values(*child_at(padding, key)) == Values(4));  // Zero is the same in int32 and float32.
  }
  const ArrayNest frame = *child_at(padding, "frame");
  for (const Array& leaf : frame.leaves) CHECK(values(leaf) == Values(12));
  CHECK(values(children(rollout.contents())[1]) == Values{0, 0, 5, 5, 0, 0, 0, 0});
}

TEST_CASE("padding leaves the rows before it as they are") {
  BufferPool pool;
  Rollout rollout(make_row(), 2, pool);
  rollout.add_row(make_row());
  rollout.add_row(make_row());
  rollout.add_output(dict_of({{"action", make_leaf({5, 5})}}), pool);
  REQUIRE(rollout.pad());
  const ArrayNest kept = rows_of(rollout).slice(0, 0, 2);
  CHECK(values(*child_at(kept, "episode_step")) == Values(4, 7));
  CHECK(values_of<float>(child_at(kept, "reward")->leaves[0]) == std::vector<float>(4, 0.5F));
}

TEST_CASE("a single row is not worth padding") {
  BufferPool pool;
  Rollout rollout(make_row(), 2, pool);
  rollout.add_row(make_row());
  CHECK_FALSE(rollout.pad());
}

TEST_CASE("rows without the keys done and truncated cannot be padded") {
  const auto is_padded = [](const ArrayNest& row) {
    BufferPool pool;
    Rollout rollout(row, 2, pool);
    rollout.add_row(row);
    rollout.add_row(row);
    return rollout.pad();
  };
  const ArrayNest leaf = make_leaf({1, 2});
  CHECK(is_padded(dict_of({{"done", leaf}, {"truncated", leaf}})));
  CHECK_FALSE(is_padded(dict_of({{"done", leaf}, {"frame", leaf}})));
  CHECK_FALSE(is_padded(tuple_of_nests({leaf, leaf, leaf, leaf, leaf})));
  CHECK_FALSE(is_padded(tuple_of_nests({leaf, leaf, leaf, leaf, leaf, leaf, leaf})));
}

TEST_CASE("outputs must have one row for each environment") {
  BufferPool pool;
  Rollout rollout(make_row(), 2, pool);
  rollout.add_row(make_row());
  CHECK_THROWS_WITH_AS(rollout.add_output(dict_of({{"action", make_leaf({1, 2, 3})}}), pool),
                       "The agent's outputs must be [1, 2, ...], one row for each environment, got "
                       "[1, 3]",
                       std::invalid_argument);
}

}  // namespace torchbeast
