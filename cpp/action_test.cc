#include "action.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>

#include "errors.h"
#include "testing.h"

namespace torchbeast {
namespace {

using Values = std::vector<std::int32_t>;

ArrayNest int64_action() {
  return leaf_of(make_array_of<std::int64_t>({kInt, 64, 1}, {1, 2}, {-1, -1}));
}

ArrayNest float_action(float first, float second) {
  return leaf_of(make_array_of<float>({kFloat, 32, 1}, {1, 2}, {first, second}));
}

}  // namespace

TEST_CASE("the action is the key of a dict or the first of a tuple") {
  const ArrayNest action = make_leaf({3}), other = make_leaf({9});
  CHECK(values(action_of(dict_of({{"a", other}, {"action", action}}))) == Values{3});
  CHECK(values(action_of(tuple_of_nests({action, other}))) == Values{3});
  // A nested action stays one.
  const ArrayNest nested = dict_of({{"move", action}});
  CHECK(action_of(tuple_of_nests({nested, other})).structure->describe() == "{move: *}");
  CHECK(action_of(dict_of({{"action", nested}})).structure->describe() == "{move: *}");
}

TEST_CASE("an output without an action is refused") {
  CHECK_THROWS_WITH_AS(action_of(dict_of({{"baseline", make_leaf({1})}})),
                       "The agent's output must be a dict with the key 'action' or a tuple that "
                       "begins with the action, got {baseline: *}",
                       NestError);
  CHECK_THROWS_AS(action_of(make_leaf({1})), NestError);
  CHECK_THROWS_AS(action_of(tuple_of({})), NestError);
  CHECK_THROWS_AS(action_of(dict_of({})), NestError);
}

TEST_CASE("an action is converted to the environments' dtype") {
  const ArrayNest target = int64_action();
  write_action(make_leaf({3, 4}), target);
  CHECK(values_of<std::int64_t>(target.leaves[0]) == std::vector<std::int64_t>{3, 4});
  write_action(float_action(5, -6), target);
  CHECK(values_of<std::int64_t>(target.leaves[0]) == std::vector<std::int64_t>{5, -6});
}

TEST_CASE("each leaf of a nested action is converted to its own dtype") {
  const ArrayNest target = dict_of({{"move", int64_action()}, {"speed", float_action(0, 0)}});
  const Array speed = make_array_of<double>({kFloat, 64, 1}, {1, 2}, {0.25, 0.5});
  write_action(dict_of({{"move", make_leaf({1, 2})}, {"speed", leaf_of(speed)}}), target);
  CHECK(values_of<std::int64_t>(target.leaves[0]) == std::vector<std::int64_t>{1, 2});
  CHECK(values_of<float>(target.leaves[1]) == std::vector<float>{0.25F, 0.5F});
}

TEST_CASE("what the environments cannot take is refused in one sentence") {
  const ArrayNest target = int64_action();
  CHECK_THROWS_WITH_AS(write_action(float_action(1, 0.5F), target),
                       "The environments expect an action int64 [1, 2], the agent gave float32 "
                       "[1, 2] with the value 0.5, which int64 cannot hold",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(write_action(make_leaf({1, 2, 3}), target),
                       "The environments expect an action int64 [1, 2], the agent gave int32 "
                       "[1, 3]",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(write_action(tuple_of_nests({make_leaf({1, 2})}), target),
                       "nests don't match: the environments expect an action *, the agent gave "
                       "(*,)",
                       NestError);
  CHECK(values_of<std::int64_t>(target.leaves[0]) == std::vector<std::int64_t>{-1, -1});
}

}  // namespace torchbeast
