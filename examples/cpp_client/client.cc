#include "client.h"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <utility>

namespace proto = torchbeast::v1;

namespace {

constexpr int kMaxMessageBytes = 64 << 20;
constexpr int kKeepaliveMs = 10'000;
constexpr std::chrono::seconds kHandshakeLimit{150};  // A learner may be building its model,
constexpr std::chrono::seconds kActionsLimit{600};    // or may be held up later.
constexpr std::chrono::seconds kFailureLimit{2};
constexpr std::size_t kMaxFailureText = 10'000;

std::string read_file(const std::string& flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::invalid_argument(flag + " must be a file that can be read, got " + path + ".");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::Channel> make_channel(const Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(-1);
  // Find out when the other end is gone, even if it does not say so.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A connection of one's own: a shared one has pauses of its own between its calls.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (options.tls_ca.empty()) {
    // The token is for the learner alone, not for a proxy that the environment names.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = read_file("--tls_ca", options.tls_ca);
  if (!options.tls_cert.empty()) {
    tls.pem_cert_chain = read_file("--tls_cert", options.tls_cert);
    tls.pem_private_key = read_file("--tls_key", options.tls_key);
  }
  return grpc::CreateCustomChannel(options.address, grpc::SslCredentials(tls), arguments);
}

bool is_permanent(grpc::StatusCode code) {
  return code == grpc::INVALID_ARGUMENT || code == grpc::FAILED_PRECONDITION ||
         code == grpc::UNAUTHENTICATED || code == grpc::UNIMPLEMENTED;
}

}  // namespace

void Client::run(const Player& player) {
  while (true) {
    const grpc::Status status = play_once(player);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_stopped_) {
        return;
      }
    }
    if (is_permanent(status.error_code())) {
      throw Refused(status.error_message());
    }
    const std::string why = status.ok() ? "The learner ended the stream." : status.error_message();
    log("No learner at " + options_.address + ": " + why + " Calling again.");
    pause();
  }
}

void Client::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_stopped_ = true;
  stop_condition_.notify_all();
  if (context_ != nullptr) {
    context_->TryCancel();
  }
}

void Client::check_deadline() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (context_ != nullptr && deadline_ && *deadline_ < Clock::now()) {
    context_->TryCancel();
  }
}

// One stream, from its start to its end.
grpc::Status Client::play_once(const Player& player) {
  grpc::ClientContext context;
  const std::unique_ptr<proto::Learner::Stub> stub =
      proto::Learner::NewStub(make_channel(options_));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    context_ = &context;
    if (is_stopped_) {
      context.TryCancel();
    }
  }
  if (!options_.token.empty()) {
    context.AddMetadata("authorization", "Bearer " + options_.token);
  }
  expect(kHandshakeLimit);
  const std::unique_ptr<Stream> stream = stub->Play(&context);  // Waits for the connection.
  std::exception_ptr error;
  try {
    play(player, *stream);
  } catch (const std::exception& caught) {
    tell_failure(*stream, caught.what());
    error = std::current_exception();
  }
  if (error) {
    context.TryCancel();
  }
  const grpc::Status status = stream->Finish();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    context_ = nullptr;
    deadline_.reset();
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return status;
}

// Returns when the stream has ended.
void Client::play(const Player& player, Stream& stream) {
  auto answer = exchange(stream, player.hello, kHandshakeLimit);
  if (!answer) {
    return;
  }
  if (!answer->has_greeting() || answer->greeting().version() != 2) {
    throw std::runtime_error("Expected a Greeting of version 2, got something else.");
  }
  const bool knows_truncation = answer->greeting().knows_truncation();
  log("Playing with the learner at " + options_.address + ".");
  proto::EnvironmentMessage message = player.first_step();
  while ((answer = exchange(stream, message, kActionsLimit))) {
    if (!answer->has_actions()) {
      throw std::runtime_error("Expected Actions, got something else.");
    }
    pause_ = std::chrono::duration<double>(kFirstPauseSeconds);  // It works: forgive the past.
    message = player.step(answer->actions(), knows_truncation);
    ++num_steps_;
  }
}

// Sends what went wrong here and waits a moment for the learner to end the stream.
void Client::tell_failure(Stream& stream, const std::string& text) {
  proto::EnvironmentMessage message;
  message.mutable_failure()->set_text(text.substr(0, kMaxFailureText));
  exchange(stream, message, kFailureLimit);
}

// Sends a message and waits for the answer; nothing if the stream has ended.
std::optional<proto::AgentMessage> Client::exchange(Stream& stream,
                                                    const proto::EnvironmentMessage& message,
                                                    Clock::duration limit) {
  expect(limit);
  proto::AgentMessage answer;
  const bool is_there = stream.Write(message) && stream.Read(&answer);
  expect(std::nullopt);
  return is_there ? std::optional(std::move(answer)) : std::nullopt;
}

void Client::expect(std::optional<Clock::duration> limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  deadline_ = limit ? std::optional(Clock::now() + *limit) : std::nullopt;
}

// Each pause is longer than the last, and a little different, so that many do not come at once.
void Client::pause() {
  const auto seconds = pause_ * std::uniform_real_distribution<double>(0.75, 1.25)(random_);
  pause_ = std::min(2 * pause_, std::chrono::duration<double>(kMaxPauseSeconds));
  std::unique_lock<std::mutex> lock(mutex_);
  stop_condition_.wait_for(lock, seconds, [this] { return is_stopped_; });
}

void Client::log(const std::string& text) {
  if (text != logged_) {  // Once, however often it is tried.
    logged_ = text;
    std::cerr << "[walk_client] " << text << std::endl;
  }
}
