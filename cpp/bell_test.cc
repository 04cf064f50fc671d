#include "bell.h"

#include <doctest/doctest.h>
#include <fcntl.h>

using torchbeast::Bell;

TEST_CASE(
    "a bell is heard at the other end of its pipe, also when the first descriptor is closed") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const Bell bell(ends[1]);
  ::close(ends[1]);
  const Bell copy = bell;
  copy.ring();
  char heard[16];
  CHECK(::read(ends[0], heard, sizeof(heard)) == 8);
  ::close(ends[0]);
}

TEST_CASE("a full bell does not block, and the last copy closes the descriptor") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  REQUIRE(::fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
  {
    const Bell bell(ends[1]);
    ::close(ends[1]);
    for (int i = 0; i < 20'000; ++i) bell.ring();
  }
  char heard[1 << 16];
  while (::read(ends[0], heard, sizeof(heard)) > 0) {
  }
  CHECK(::read(ends[0], heard, sizeof(heard)) == 0);  // The end: nobody can ring any more.
  ::close(ends[0]);
}

TEST_CASE("no bell rings for nobody, and a bad descriptor is refused") {
  CHECK_NOTHROW(Bell().ring());
  CHECK_THROWS_AS(Bell(-1), std::runtime_error);
}
