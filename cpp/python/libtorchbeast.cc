// The Python module libtorchbeast._C: the core's queues with torch tensors at the edge.
//
// Everything that waits or copies runs without the interpreter lock. Tensors are converted with it,
// on the way in and on the way out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../actor_pool.h"
#include "../batching_queue.h"
#include "../dynamic_batcher.h"
#include "../errors.h"
#include "../turn.h"
#include "convert.h"
#include "references.h"
#include "tensor.h"
#include "without_gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchbeast {
namespace {

// A Python exception that a consumer has set for the callers that wait for its batch.
struct ForwardedException : std::exception {
  explicit ForwardedException(nb::handle error) : object(hold(error)) {}
  const char* what() const noexcept override { return "Python exception"; }
  std::shared_ptr<void> object;
};

unsigned long main_thread;  // Set at import.

// Ctrl-C arrives only in the main thread, so the other threads need no poll.
Poll signals() {
  if (PyThread_get_thread_ident() != main_thread) return {};
  return [] {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
}

void register_exceptions(nb::module_& m) {
  nb::exception<ClosedBatchingQueue>(m, "ClosedBatchingQueue", PyExc_RuntimeError);
  nb::exception<AsyncError>(m, "AsyncError", PyExc_RuntimeError);

  nb::object nest_error = nb::module_::import_("nest").attr("NestError");
  m.attr("NestError") = nest_error;
  nb::register_exception_translator(
      [](const std::exception_ptr& error, void* type) {
        try {
          std::rethrow_exception(error);
        } catch (const NestError& e) {
          PyErr_SetString(static_cast<PyObject*>(type), e.what());
        } catch (const ForwardedException& e) {
          auto* object = static_cast<PyObject*>(e.object.get());
          PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object)), object);
        }
      },
      nest_error.release().ptr());
}

std::vector<std::int64_t> to_vector(const Shape& shape) { return {shape.begin(), shape.end()}; }

void bind_array(nb::module_& m) {
  nb::class_<Array>(m, "Array", "An array as the core holds it: a view of somebody's memory.")
      .def(
          "__init__",
          [](Array* self, nb::handle object) {
            release_dropped();
            new (self) Array(array_from_python(object));
          },
          "object"_a.none(), "View a torch tensor or a NumPy array, without a copy.")
      .def_prop_ro("dtype", [](const Array& self) { return self.dtype.name(); })
      .def_prop_ro("shape", [](const Array& self) { return to_vector(self.shape); })
      .def_prop_ro(
          "strides", [](const Array& self) { return to_vector(self.strides); }, "In elements.")
      .def("torch", &array_to_torch, "The same memory as a torch tensor.");
}

void bind_batching_queue(nb::module_& m) {
  nb::class_<BatchingQueue>(
      m, "BatchingQueue",
      "Collects nests of tensors and hands them out concatenated along batch_dim.\n\n"
      "Sizes count rows along batch_dim; an item may bring any number of them, and is split\n"
      "where a batch is full. Iteration ends when the queue is closed.")
      .def(
          "__init__",
          [](BatchingQueue* self, std::int64_t batch_dim, std::int64_t minimum_batch_size,
             std::int64_t maximum_batch_size, std::optional<std::int64_t> timeout_ms, bool,
             std::optional<std::int64_t> maximum_queue_size) {
            new (self) BatchingQueue(QueueOptions{batch_dim, minimum_batch_size, maximum_batch_size,
                                                  timeout_ms, maximum_queue_size});
          },
          "batch_dim"_a = 1, "minimum_batch_size"_a = 1, "maximum_batch_size"_a = 1024,
          "timeout_ms"_a = nb::none(), "check_inputs"_a = true, "maximum_queue_size"_a = nb::none(),
          "With timeout_ms, a batch smaller than the minimum is handed out when it expires.\n"
          "Inputs are always checked (it costs nanoseconds): check_inputs changes nothing.")
      .def(
          "enqueue",
          [](BatchingQueue& self, nb::handle nest) {
            ArrayNest item = nest_from_python(nest);
            const Poll poll = signals();
            without_gil([&] { self.enqueue(std::move(item), poll); });
          },
          "nest"_a.none(),
          "Add a nest of tensors; wait while the queue is full. The tensors are read when a\n"
          "batch is assembled: don't change them afterwards.")
      .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__next__",
          [](BatchingQueue& self) {
            const Poll poll = signals();
            const std::optional<ArrayNest> batch = without_gil([&] { return self.dequeue(poll); });
            if (!batch) throw nb::stop_iteration();
            return nest_to_python(*batch);
          },
          "Wait for the next batch, a nest of tensors.")
      .def("size", &BatchingQueue::size, "Rows that wait.")
      .def(
          "resize",
          [](BatchingQueue& self, std::int64_t minimum_batch_size, std::int64_t maximum_batch_size,
             std::optional<std::int64_t> maximum_queue_size) {
            without_gil(
                [&] { self.resize(minimum_batch_size, maximum_batch_size, maximum_queue_size); });
          },
          "minimum_batch_size"_a, "maximum_batch_size"_a, "maximum_queue_size"_a.none(),
          "Change the sizes while the queue is in use, from any thread. A queue of size 0 stays\n"
          "one, and no other becomes one.")
      .def("members", &BatchingQueue::members,
           "An ActorPool's groups of environments that are playing: (client, environments) each.")
      .def(
          "close", [](BatchingQueue& self) { without_gil([&] { self.close(); }); },
          "Drop what waits and end all calls that wait.")
      .def("is_closed", &BatchingQueue::is_closed, "Whether close() was called.");
}

void bind_dynamic_batcher(nb::module_& m) {
  nb::class_<Batch>(m, "Batch", "Inputs of several compute() calls, to be answered at once.")
      .def(
          "get_inputs", [](const Batch& self) { return nest_to_python(self.inputs()); },
          "The nest of input tensors, concatenated along the batch dimension.")
      .def(
          "set_outputs",
          [](Batch& self, nb::handle outputs) {
            ArrayNest nest = nest_from_python(outputs);
            without_gil([&] { self.set_outputs(std::move(nest)); });
          },
          "outputs"_a.none(), "Answer all calls with their rows of a nest of tensors.")
      .def(
          "set_exception",
          [](Batch& self, nb::handle exception) {
            if (!PyExceptionInstance_Check(exception.ptr())) {
              throw nb::type_error("set_exception needs an exception, such as RuntimeError('...')");
            }
            const ForwardedException error(exception);
            without_gil([&] { self.set_exception([error] { throw error; }); });
          },
          "exception"_a, "Let all calls raise this instead.");

  nb::class_<DynamicBatcher>(
      m, "DynamicBatcher",
      "Lets many threads share one forward pass: each calls compute() with its own rows, a\n"
      "consumer iterates over batches of them.\n\n"
      "Sizes count rows along batch_dim; a call may bring any number of them, and is split where\n"
      "a batch is full. Iteration ends when the batcher is closed.")
      .def(
          "__init__",
          [](DynamicBatcher* self, std::int64_t batch_dim, std::int64_t minimum_batch_size,
             std::int64_t maximum_batch_size, std::optional<std::int64_t> timeout_ms, bool) {
            new (self) DynamicBatcher(
                QueueOptions{batch_dim, minimum_batch_size, maximum_batch_size, timeout_ms, {}});
          },
          "batch_dim"_a = 1, "minimum_batch_size"_a = 1, "maximum_batch_size"_a = 1024,
          "timeout_ms"_a.none() = 100, "check_outputs"_a = true,
          "With timeout_ms, a batch smaller than the minimum is handed out when it expires.\n"
          "Outputs are always checked (it costs nanoseconds): check_outputs changes nothing.")
      .def(
          "compute",
          [](DynamicBatcher& self, nb::handle inputs) {
            ArrayNest nest = nest_from_python(inputs);
            const Poll poll = signals();
            return nest_to_python(without_gil([&] { return self.compute(std::move(nest), poll); }));
          },
          "inputs"_a.none(),
          "Wait until a consumer has set the outputs; return those of these rows.")
      .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__next__",
          [](DynamicBatcher& self) {
            const Poll poll = signals();
            auto batch = without_gil([&] { return self.get_batch(poll); });
            if (!batch) throw nb::stop_iteration();
            return batch;
          },
          "Wait for the next Batch.")
      .def("size", &DynamicBatcher::size, "Rows that wait to be put into a batch.")
      .def(
          "close", [](DynamicBatcher& self) { without_gil([&] { self.close(); }); },
          "End all calls that wait: compute() with ClosedBatchingQueue, iteration by stopping.")
      .def("is_closed", &DynamicBatcher::is_closed, "Whether close() was called.");
}

// The deadline for a wait of so many seconds; a year stands for anything longer.
Clock::time_point after(double seconds) {
  constexpr double kYear = 365 * 86400.0;
  return Clock::now() + std::chrono::milliseconds(
                            static_cast<std::int64_t>(1000 * std::clamp(seconds, 0.0, kYear)));
}

// Calls wait(deadline), which returns a state, until is_over(state) or the time is over.
template <typename Wait, typename IsOver>
Turn::State wait_in_slices(double seconds, Wait wait, IsOver is_over) {
  const Poll poll = signals();
  const Clock::time_point deadline = after(seconds);
  return without_gil([&] {
    for (;;) {  // In slices, for Ctrl-C.
      const Clock::time_point next = Clock::now() + kPollInterval;
      const bool last = !poll || deadline <= next;
      const Turn::State now = wait(last ? deadline : next);
      if (last || is_over(now)) return now;
      poll();
    }
  });
}

Turn::State wait_for_actions(const Turn& turn, double timeout_s) {
  return wait_in_slices(
      timeout_s, [&](Clock::time_point deadline) { return turn.wait_for_actions(deadline); },
      [](Turn::State now) { return now != Turn::kAgent; });
}

void bind_turn(nb::module_& m) {
  auto turn =
      nb::class_<Turn>(m, "Turn", "Whose turn it is on a lane: one word of shared memory.")
          .def(
              "__init__",
              [](Turn* self, nb::handle object) {
                const Array word = array_from_python(object);
                if (word.dtype != DType{kUInt, 32, 1} || word.num_elements() != 1) {
                  throw nb::type_error("Turn needs an array of one uint32");
                }
                new (self) Turn(reinterpret_cast<std::uint32_t*>(word.data), word.owner);
              },
              "word"_a)
          .def_prop_ro("state", &Turn::state)
          .def("pass_on", &Turn::pass, "from_"_a, "to"_a,
               "Pass the turn and wake the other side; False if the turn is not `from_`'s.")
          .def("abandon", &Turn::abandon,
               "Mark the environments as gone, whichever side has the turn.")
          .def("close", &Turn::close, "Close the lane for good, whichever side has the turn.")
          .def(
              "wait_while",
              [](const Turn& self, Turn::State state, double timeout_s) {
                return wait_in_slices(
                    timeout_s,
                    [&](Clock::time_point deadline) { return self.wait_while(state, deadline); },
                    [=](Turn::State now) { return now != state; });
              },
              "state"_a, "timeout_s"_a,
              "Wait for another state and return it; the same one when the time is over.")
          .def("wait_for_actions", &wait_for_actions, "timeout_s"_a,
               "For the environments' side: as wait_while(AGENT).")
          .def(
              "exchange",
              [](const Turn& self, Turn::State from, double timeout_s) {
                if (!self.pass(from, Turn::kAgent)) return Turn::kClosed;
                return wait_for_actions(self, timeout_s);
              },
              "from_"_a, "timeout_s"_a,
              "Pass the turn to the agent, and wait_for_actions; CLOSED if it is not `from_`.");
  nb::enum_<Turn::State>(turn, "State", nb::is_arithmetic())
      .value("FREE", Turn::kFree, "No environments.")
      .value("AGENT", Turn::kAgent, "The rows are written.")
      .value("ENVIRONMENT", Turn::kEnvironment, "The actions are written.")
      .value("GONE", Turn::kGone, "The environments left; their rollout is to be padded.")
      .value("CLOSED", Turn::kClosed, "The end.");
}

// Stops without the interpreter lock: its actors may wait for a thread that needs the lock.
struct PythonActorPool : ActorPool {
  using ActorPool::ActorPool;
  ~PythonActorPool() {
    without_gil([this] { stop(); });
  }
};

void bind_actor_pool(nb::module_& m) {
  nb::class_<PythonActorPool>(
      m, "ActorPool",
      "Threads that carry rows and actions between lanes and agent, and rollouts to the learner.")
      .def(
          "__init__",
          [](PythonActorPool* self, std::int64_t unroll_length, BatchingQueue& learner_queue,
             DynamicBatcher& inference_batcher, nb::handle initial_agent_state) {
            new (self) PythonActorPool(unroll_length, learner_queue, inference_batcher,
                                       nest_from_python(initial_agent_state));
          },
          "unroll_length"_a, "learner_queue"_a, "inference_batcher"_a, "initial_agent_state"_a,
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def(
          "add_lane",
          [](PythonActorPool& self, const Turn& turn, nb::handle row, nb::handle action,
             std::optional<int> wakeup_fd, std::int64_t client, bool has_rollouts,
             bool marks_rows) {
            Lane lane{turn, nest_from_python(row), nest_from_python(action)};
            if (wakeup_fd) lane.wakeup = Wakeup(*wakeup_fd);
            lane.client = client;
            lane.has_rollouts = has_rollouts;
            lane.marks_rows = marks_rows;
            without_gil([&] { self.add_lane(std::move(lane)); });
          },
          "turn"_a, "row"_a, "action"_a, "wakeup_fd"_a = nb::none(), "client"_a = 0,
          "has_rollouts"_a = false, "marks_rows"_a = true,
          "Start an actor for a lane of arrays [1, K, ...].\n"
          "The row is a dict, or a tuple for code written for TorchBeast; agent and learner\n"
          "get the same containers. The wakeup is written to when the turn goes to the\n"
          "environments; its descriptor is copied. Clients have equal shares of agent and\n"
          "learner. With has_rollouts the row is ((rows, outputs), agent_state), whole\n"
          "rollouts for the learner, and the action is empty. Without marks_rows the\n"
          "environments' side never sees a marked turn, which older versions do not know.")
      .def(
          "run",
          [](PythonActorPool& self) {
            const Poll poll = signals();
            without_gil([&] { self.run(poll); });
          },
          "Wait until a queue is closed and all actors have ended; raise what went wrong in one.")
      .def(
          "close", [](PythonActorPool& self) { without_gil([&] { self.close(); }); },
          "Close all lanes and end all actors; returns at once.")
      .def("num_actors", &PythonActorPool::num_actors, "Actors that have not ended.")
      .def(
          "count", [](const PythonActorPool& self) { return self.counts().steps.load(); },
          "Environment steps so far.")
      .def(
          "counts",
          [](const PythonActorPool& self) {
            const ActorCounts& counts = self.counts();
            nb::dict result;
            result["steps"] = counts.steps.load();
            result["rollouts"] = counts.rollouts.load();
            result["padded_rollouts"] = counts.padded_rollouts.load();
            result["dropped_rollouts"] = counts.dropped_rollouts.load();
            result["seconds_for_environments"] = 1e-9 * counts.ns_for_environments.load();
            result["seconds_for_agent"] = 1e-9 * counts.ns_for_agent.load();
            result["seconds_for_learner"] = 1e-9 * counts.ns_for_learner.load();
            return result;
          },
          "What the actors did, and how long they waited for whom, summed over all of them. Steps\n"
          "and rollouts are those of single environments.");
}

}  // namespace
}  // namespace torchbeast

NB_MODULE(_C, m) {
  using namespace torchbeast;
  // Queues in global variables outlive nanobind's check for leaks; they are not leaks.
  nb::set_leak_warnings(false);
  nb::object thread = nb::module_::import_("threading").attr("main_thread")();
  main_thread = nb::cast<unsigned long>(thread.attr("ident"));
  m.doc() = "The data plane: queues that batch nests of tensors outside the interpreter lock.";
  register_exceptions(m);
  bind_array(m);
  bind_batching_queue(m);
  bind_dynamic_batcher(m);
  bind_turn(m);
  bind_actor_pool(m);
}
