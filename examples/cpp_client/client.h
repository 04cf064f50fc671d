// A stream to a learner that listens, dialled again whenever it breaks. Knows nothing of what is
// played: that comes from three functions.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>

#include "env.grpc.pb.h"

struct Options {
  std::string address = "127.0.0.1:4242";
  std::string token;     // From TORCHBEAST_TOKEN.
  std::string tls_ca;    // PEM; empty: no TLS.
  std::string tls_cert;  // PEM, as is tls_key; empty: none of one's own.
  std::string tls_key;
  std::string tls_server_name;
};

// What is played. `step` may throw: the learner hears of it, and `run` passes it on.
struct Player {
  torchbeast::v1::EnvironmentMessage hello;
  std::function<torchbeast::v1::EnvironmentMessage()> first_step;
  std::function<torchbeast::v1::EnvironmentMessage(const torchbeast::v1::Actions&,
                                                   bool knows_truncation)>
      step;
};

// The learner does not want these environments: something is to be corrected first.
class Refused : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Client {
 public:
  explicit Client(Options options) : options_(std::move(options)) {}

  // Plays until `stop`; throws Refused, and what `player.step` throws.
  void run(const Player& player);

  std::uint64_t num_steps() const { return num_steps_; }

  // The two below may be called from any thread.
  void stop();
  void check_deadline();  // Gives up a stream whose learner is silent for too long; call it often.

 private:
  using Clock = std::chrono::steady_clock;
  using Stream =
      grpc::ClientReaderWriter<torchbeast::v1::EnvironmentMessage, torchbeast::v1::AgentMessage>;

  grpc::Status play_once(const Player& player);
  void play(const Player& player, Stream& stream);
  void tell_failure(Stream& stream, const std::string& text);
  std::optional<torchbeast::v1::AgentMessage> exchange(
      Stream& stream, const torchbeast::v1::EnvironmentMessage& message, Clock::duration limit);
  void expect(std::optional<Clock::duration> limit);
  void pause();
  void log(const std::string& text);

  const Options options_;
  std::mutex mutex_;
  std::condition_variable stop_condition_;
  bool is_stopped_ = false;                 // Guarded by mutex_, as are the next two.
  grpc::ClientContext* context_ = nullptr;  // Of the stream that is open.
  std::optional<Clock::time_point> deadline_;
  std::chrono::duration<double> pause_{kFirstPauseSeconds};
  std::mt19937 random_{std::random_device{}()};
  std::string logged_;
  std::uint64_t num_steps_ = 0;

  static constexpr double kFirstPauseSeconds = 0.1;
  static constexpr double kMaxPauseSeconds = 10.0;
};
