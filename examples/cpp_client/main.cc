// Environments that dial a learner: flags, signals, exit codes.
//
//   walk_client --connect 127.0.0.1:4242 --num_envs 8 --task walk
//
// Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 if something broke, 2 for a mistake or a
// refusal.
#include <algorithm>
#include <atomic>
#include <cctype>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <string>
#include <thread>

#include "aim.h"
#include "client.h"
#include "group.h"
#include "masked_walk.h"
#include "walk.h"

namespace {

struct Flags {
  Options options;
  std::uint32_t num_envs = 8;
  std::uint32_t seed = 1;
  std::string task = "walk";
  bool insecure = false;
};

constexpr char kUsage[] =
    "walk_client [--connect host:port] [--num_envs 8] [--seed 1] [--task walk|masked_walk|aim]\n"
    "            [--tls_ca ca.pem] [--tls_cert cert.pem --tls_key cert.key]\n"
    "            [--tls_server_name name] [--insecure]\n"
    "The token, if the learner wants one, comes from the variable TORCHBEAST_TOKEN.\n";

std::uint32_t to_number(const std::string& flag, const std::string& text) {
  const bool is_number =
      !text.empty() && text.size() < 10 &&
      std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!is_number) {
    throw std::invalid_argument(flag + " must be a number, got '" + text + "'.");
  }
  return static_cast<std::uint32_t>(std::stoul(text));
}

// Whether only users of this machine can be at the other end.
bool is_local(const std::string& address) {
  const std::string host = address.substr(0, address.rfind(':'));
  const bool has_only_digits = host.find_first_not_of("0123456789.") == std::string::npos;
  return address.rfind("unix:", 0) == 0 || host == "localhost" || host == "[::1]" ||
         (host.rfind("127.", 0) == 0 && has_only_digits);
}

void check(const Flags& flags) {
  if (flags.num_envs < 1 || flags.num_envs > 1 << 16) {
    throw std::invalid_argument("--num_envs must be from 1 to 65536, got " +
                                std::to_string(flags.num_envs) + ".");
  }
  if (flags.task != "walk" && flags.task != "masked_walk" && flags.task != "aim") {
    throw std::invalid_argument("--task must be walk, masked_walk or aim, got " + flags.task + ".");
  }
  const Options& options = flags.options;
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    throw std::invalid_argument(
        "--tls_cert and --tls_key belong together, got only one; give both.");
  }
  if (!options.tls_cert.empty() && options.tls_ca.empty()) {
    throw std::invalid_argument("--tls_cert needs --tls_ca, got none; give both.");
  }
  const bool is_safe = !options.tls_ca.empty() && !options.token.empty();
  if (!is_local(options.address) && !is_safe && !flags.insecure) {
    throw std::invalid_argument(
        "Dialing another machine needs --tls_ca and a token in TORCHBEAST_TOKEN, or --insecure for "
        "a network that you trust.");
  }
}

Flags parse(int argc, char** argv) {
  Flags flags;
  if (const char* token = std::getenv("TORCHBEAST_TOKEN")) {
    flags.options.token = token;
  }
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--insecure") {
      flags.insecure = true;
      continue;
    }
    if (i + 1 == argc) {
      throw std::invalid_argument(flag + " is not known or needs a value.\n" + kUsage);
    }
    const std::string value = argv[++i];
    if (flag == "--connect") {
      flags.options.address = value;
    } else if (flag == "--num_envs") {
      flags.num_envs = to_number(flag, value);
    } else if (flag == "--seed") {
      flags.seed = to_number(flag, value);
    } else if (flag == "--task") {
      flags.task = value;
    } else if (flag == "--tls_ca") {
      flags.options.tls_ca = value;
    } else if (flag == "--tls_cert") {
      flags.options.tls_cert = value;
    } else if (flag == "--tls_key") {
      flags.options.tls_key = value;
    } else if (flag == "--tls_server_name") {
      flags.options.tls_server_name = value;
    } else {
      throw std::invalid_argument(flag + " is not known.\n" + kUsage);
    }
  }
  check(flags);
  return flags;
}

// Takes the signals of all threads, which must have them blocked, and looks after time limits.
class Watcher {
 public:
  Watcher(Client& client, const sigset_t& signals)
      : thread_([this, &client, signals] { watch(client, signals); }) {}

  ~Watcher() {
    is_over_ = true;
    thread_.join();
  }

  int signal() const { return signal_; }

 private:
  void watch(Client& client, const sigset_t& signals) {
    const timespec patience{0, 100'000'000};
    while (!is_over_) {
      const int signal = sigtimedwait(&signals, nullptr, &patience);
      if (signal > 0) {
        signal_ = signal;
        client.stop();
      }
      client.check_deadline();
    }
  }

  std::atomic<bool> is_over_{false};
  std::atomic<int> signal_{0};
  std::thread thread_;
};

template <typename Environment>
int play(const Flags& flags, const sigset_t& signals) {
  Group<Environment> group(flags.num_envs, flags.seed);
  Client client(flags.options);
  const Watcher watcher(client, signals);
  client.run({
      group.hello(),
      [&] { return group.first_step(); },
      [&](const proto::Actions& actions, bool knows_truncation) {
        return group.step(actions, knows_truncation);
      },
  });
  std::cerr << "[walk_client] Played " << client.num_steps() << " steps." << std::endl;
  return watcher.signal() == SIGINT ? 130 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // Before gRPC starts threads of its own.
  try {
    const Flags flags = parse(argc, argv);
    if (flags.task == "aim") {
      return play<Aim>(flags, signals);
    }
    return flags.task == "walk" ? play<Walk>(flags, signals) : play<MaskedWalk>(flags, signals);
  } catch (const Refused& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 2;
  } catch (const std::invalid_argument& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
}
