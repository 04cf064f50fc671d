#include "wakeup.h"

#include <doctest/doctest.h>
#include <fcntl.h>

using torchbeast::Wakeup;

TEST_CASE(
    "a wakeup arrives at the other end of its pipe, also when the first descriptor is closed") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const Wakeup wakeup(ends[1]);
  ::close(ends[1]);
  const Wakeup copy = wakeup;
  copy.notify();
  char data[16];
  CHECK(::read(ends[0], data, sizeof(data)) == 8);
  ::close(ends[0]);
}

TEST_CASE("a full wakeup does not block, and the last copy closes the descriptor") {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  REQUIRE(::fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
  {
    const Wakeup wakeup(ends[1]);
    ::close(ends[1]);
    for (int i = 0; i < 20'000; ++i) wakeup.notify();
  }
  char data[1 << 16];
  while (::read(ends[0], data, sizeof(data)) > 0) {
  }
  CHECK(::read(ends[0], data, sizeof(data)) == 0);  // The end: nobody can notify any more.
  ::close(ends[0]);
}

TEST_CASE("a wakeup without a descriptor wakes nobody, and a bad descriptor is refused") {
  CHECK_NOTHROW(Wakeup().notify());
  CHECK_THROWS_AS(Wakeup(-1), std::runtime_error);
}
