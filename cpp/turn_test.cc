#include "turn.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

namespace torchbeast {
namespace {

using State = Turn::State;

// A word that a forked process shares.
struct SharedWord {
  SharedWord()
      : memory(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~SharedWord() { munmap(memory, 4096); }
  Turn turn() const { return {static_cast<std::uint32_t*>(memory), nullptr}; }
  void* memory;
};

Clock::time_point in_ms(int milliseconds) {
  return Clock::now() + std::chrono::milliseconds(milliseconds);
}

void check_passing_back_and_forth() {
  const SharedWord word;
  const Turn turn = word.turn();
  constexpr int kRounds = 2000;
  std::thread environment([&] {
    CHECK(turn.pass(State::kFree, State::kAgent));
    for (int i = 0; i < kRounds; ++i) {
      CHECK(turn.wait_for_actions(in_ms(10'000)) == State::kEnvironment);
      CHECK(turn.pass(State::kEnvironment, State::kAgent));
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    CHECK(turn.wait_for_rows(in_ms(10'000)) == State::kAgent);
    turn.take_rows();
    CHECK(turn.state() == State::kAgent);
    CHECK(turn.pass(State::kAgent, State::kEnvironment));
  }
  environment.join();
}

}  // namespace

TEST_CASE("the turn goes back and forth, by futex and by polling") {
  check_passing_back_and_forth();
  use_waiter(polling_waiter());
  check_passing_back_and_forth();
  use_waiter(system_waiter());
}

TEST_CASE("waiting ends when the time is over") {
  const SharedWord word;
  const Clock::time_point start = Clock::now();
  CHECK(word.turn().wait_while(State::kFree, in_ms(50)) == State::kFree);
  CHECK(Clock::now() - start >= std::chrono::milliseconds(50));
}

TEST_CASE("who does not have the turn cannot pass it") {
  const SharedWord word;
  CHECK_FALSE(word.turn().pass(State::kEnvironment, State::kAgent));
  CHECK(word.turn().state() == State::kFree);
}

TEST_CASE("rows that were taken are not taken again, however the turn goes round") {
  const SharedWord word;
  const Turn turn = word.turn();
  turn.pass(State::kFree, State::kAgent);
  turn.take_rows();
  CHECK_FALSE(turn.wait_for_rows(in_ms(10)).has_value());
  CHECK(turn.wait_for_actions(in_ms(10)) == State::kAgent);
  turn.pass(State::kAgent, State::kEnvironment);
  CHECK_FALSE(turn.wait_for_rows(in_ms(10)).has_value());
  turn.take_rows();  // There are none.
  CHECK(turn.state() == State::kEnvironment);
  turn.pass(State::kEnvironment, State::kAgent);
  CHECK(turn.wait_for_rows(in_ms(10)) == State::kAgent);
}

TEST_CASE("who waits for rows hears of the end, also while the agent looks at some") {
  for (const auto end : {&Turn::abandon, &Turn::close}) {
    const SharedWord word;
    const Turn turn = word.turn();
    turn.pass(State::kFree, State::kAgent);
    turn.take_rows();
    std::thread actor([&] { CHECK(turn.wait_for_rows(in_ms(10'000)) >= State::kGone); });
    std::thread environment([&] { CHECK(turn.wait_for_actions(in_ms(10'000)) >= State::kGone); });
    (turn.*end)();
    actor.join();
    environment.join();
  }
}

TEST_CASE("a killed process holds up nobody: its turn is taken from it") {
  const SharedWord word;
  const Turn turn = word.turn();
  turn.pass(State::kFree, State::kAgent);
  const pid_t child = fork();
  if (child == 0) {
    turn.wait_while(State::kAgent, in_ms(10'000));
    kill(getpid(), SIGKILL);  // In the middle of its turn.
  }
  turn.pass(State::kAgent, State::kEnvironment);
  waitpid(child, nullptr, 0);
  CHECK(turn.state() == State::kEnvironment);
  turn.abandon();
  CHECK(turn.wait_while(State::kEnvironment, in_ms(1000)) == State::kGone);
}

TEST_CASE("a closed lane stays closed, a free one has nobody to abandon") {
  const SharedWord word;
  const Turn turn = word.turn();
  turn.abandon();
  CHECK(turn.state() == State::kFree);
  turn.close();
  turn.abandon();
  CHECK(turn.state() == State::kClosed);
  CHECK_FALSE(turn.pass(State::kEnvironment, State::kAgent));
}

}  // namespace torchbeast
