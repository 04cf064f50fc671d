#include "array_nest.h"

#include <doctest/doctest.h>

#include <stdexcept>

#include "errors.h"
#include "testing.h"

namespace torchbeast {
namespace {

// (*, {a: *, b: [*]}) with the outer container of the kind asked for.
std::shared_ptr<Structure> make_structure(Structure::Kind kind, const std::string& key = "b") {
  auto structure = std::make_shared<Structure>();
  if (kind == Structure::Kind::kTuple) structure->add_tuple(2);
  if (kind == Structure::Kind::kList) structure->add_list(2);
  if (kind == Structure::Kind::kNamedTuple) structure->add_named_tuple(2, nullptr);
  structure->add_leaf();
  structure->add_dict({"a", key});
  structure->add_leaf();
  structure->add_list(1);
  structure->add_leaf();
  return structure;
}

}  // namespace

using Kind = Structure::Kind;

TEST_CASE("a structure describes itself") {
  CHECK(make_structure(Kind::kTuple)->describe() == "(*, {a: *, b: [*]})");
  Structure nested;
  nested.add_dict({"x", "y"});
  nested.add_dict({"in"});
  nested.add_tuple(1);
  nested.add_leaf();
  nested.add_leaf();
  CHECK(nested.describe() == "{x: {in: (*,)}, y: *}");
}

TEST_CASE("sequences match whatever their kind, dicts by their keys") {
  const auto tuple = make_structure(Kind::kTuple);
  CHECK(tuple->matches(*make_structure(Kind::kList)));
  CHECK(tuple->matches(*make_structure(Kind::kNamedTuple)));
  CHECK_FALSE(tuple->matches(*make_structure(Kind::kTuple, "c")));

  Structure leaf, empty;
  leaf.add_leaf();
  empty.add_tuple(0);
  CHECK_FALSE(leaf.matches(empty));
  CHECK_FALSE(leaf.matches(*tuple));
}

TEST_CASE("a child is found by its key in the outermost dict only") {
  const ArrayNest inner = dict_of({{"action", make_leaf({1})}});
  const ArrayNest dict = dict_of({{"baseline", inner}, {"action", make_leaf({2})}});
  CHECK(values(*child_at(dict, "action")) == std::vector<std::int32_t>{2});
  CHECK(child_at(dict, "baseline")->structure->describe() == "{action: *}");
  CHECK_FALSE(child_at(dict_of({{"inner", inner}}), "action"));
  CHECK_FALSE(child_at(tuple_of_nests({inner}), "action"));
  CHECK_FALSE(child_at(make_leaf({1}), "action"));
  CHECK_FALSE(child_at(dict_of({}), "action"));
}

TEST_CASE("nests fit when only the batch dimension differs") {
  const ArrayNest nest = make_leaf({1, 2});
  CHECK_NOTHROW(check_fits(make_leaf({1, 2, 3}), nest, 1));
  CHECK_THROWS_AS(check_fits(make_leaf({1, 2, 3}), nest, 0), std::invalid_argument);

  ArrayNest other = make_leaf({1, 2});
  other.leaves[0].dtype = {kFloat, 32, 1};
  CHECK_THROWS_AS(check_fits(other, nest, 1), std::invalid_argument);

  auto structure = std::make_shared<Structure>();
  structure->add_list(1);
  structure->add_leaf();
  CHECK_THROWS_AS(check_fits({structure, nest.leaves}, nest, 1), NestError);
}

}  // namespace torchbeast
