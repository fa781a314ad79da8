// _C: host-side objects for Python. No torch here; tensors go through the op library.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <set>
#include <string>

#include "core/segment_layout.h"
#include "runtime/group.h"
#include "runtime/segment.h"

namespace py = pybind11;

namespace interlace {
namespace {

// The exception a signal handler raised while an op was waiting, until Python asks for it.
struct PendingException {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
};
PendingException pending;

bool signal_handler_raised() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  if (raised) PyErr_Fetch(&pending.type, &pending.value, &pending.traceback);
  PyGILState_Release(state);
  return raised;
}

void raise_pending() {
  if (pending.type == nullptr) return;
  PyErr_Restore(pending.type, pending.value, pending.traceback);
  pending = {};
  throw py::error_already_set();
}

std::shared_ptr<Group> require_group(const std::string& name) {
  auto group = find_group(name);
  if (group == nullptr) throw py::key_error("no symmetric memory for group '" + name + "'");
  return group;
}

void join_group(const std::string& name, int rank, Segment& own, const std::vector<int>& descriptors,
                const std::vector<int>& pids, double timeout, bool oversubscribed, uint32_t first_epoch,
                int64_t half_bytes, int64_t max_half_bytes) {
  const py::gil_scoped_release release;
  GroupOptions options;
  options.name = name;
  options.rank = rank;
  options.world_size = static_cast<int>(pids.size());
  options.pids = pids;
  options.timeout_seconds = timeout;
  options.oversubscribed = oversubscribed;
  options.first_epoch = first_epoch;
  options.half_bytes = half_bytes;
  options.max_half_bytes = max_half_bytes;
  std::vector<Segment> peers;
  for (int r = 0; r < options.world_size; ++r) {
    peers.push_back(r == rank ? Segment() : Segment::attach(descriptors[r]));
  }
  register_group(std::make_shared<Group>(std::move(options), std::move(own), std::move(peers)));
}

Segment create_segment(int rank, int world_size, int64_t reserve_bytes, int64_t half_bytes,
                       uint32_t first_epoch) {
  if (const int64_t available = available_memory() / world_size; 2 * half_bytes > available) {
    throw py::value_error("a workspace of " + std::to_string(2 * half_bytes) +
                          " bytes per rank: not enough memory, " + std::to_string(available) +
                          " bytes are available to each of " + std::to_string(world_size) +
                          " ranks; lower workspace_bytes or INTERLACE_WORKSPACE");
  }
  Segment segment = Segment::create(reserve_bytes);
  if (const char* reason = segment.back(kControlBytes + 2 * half_bytes, world_size); *reason != 0) {
    throw py::value_error("interlace: a workspace of 2 x " + std::to_string(half_bytes) +
                          " bytes per rank: " + reason);
  }
  prepare_control_page(segment, rank, world_size, first_epoch);
  return segment;
}

// The path of a call whose way Python chose. The texts are kept: paths point at them, and there are few.
void note_python_path(const std::string& op, const std::string& algorithm, const std::string& reason,
                      bool fused) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard lock(mutex);
  note_path(
      {op_named(op), texts.insert(algorithm).first->c_str(), texts.insert(reason).first->c_str(), fused});
}

py::dict describe_group(const std::string& name) {
  const auto group = require_group(name);
  py::dict info;
  info["rank"] = group->rank();
  info["world_size"] = group->world_size();
  info["epoch"] = group->epoch();
  info["half_bytes"] = group->half_bytes();
  info["streaming"] = group->streaming();
  info["line_nanoseconds"] = group->line_nanoseconds();
  info["segment_bytes"] = group->bytes_backed();
  return info;
}

void start_trace(const std::string& name, int64_t capacity) {
  if (capacity < 1)
    throw py::value_error("start_trace: capacity=" + std::to_string(capacity) + "; need 1 at least");
  const auto group = require_group(name);
  const py::gil_scoped_release release;  // a call that holds the lock may ask Python for pending signals
  const std::lock_guard lock(group->mutex());
  group->start_trace(capacity);
}

// (begin, end, op, work, epoch, part, peer, thread) of every event, and how many found no room.
py::tuple stop_trace(const std::string& name) {
  const auto group = require_group(name);
  std::unique_ptr<Trace> trace;
  {
    const py::gil_scoped_release release;
    const std::lock_guard lock(group->mutex());
    trace = group->take_trace();
  }
  py::list events;
  if (trace == nullptr) return py::make_tuple(events, 0);
  for (const TraceEvent& e : trace->events()) {
    events.append(
        py::make_tuple(e.begin, e.end, op_name(e.op), work_name(e.work), e.epoch, e.part, e.peer, e.thread));
  }
  return py::make_tuple(events, trace->dropped());
}

}  // namespace
}  // namespace interlace

PYBIND11_MODULE(_C, m) {
  using namespace interlace;
  m.attr("MAX_RANKS") = kMaxRanks;
  py::class_<Segment>(m, "Segment").def_property_readonly("descriptor", &Segment::descriptor);
  m.def("create_segment", &create_segment, py::arg("rank"), py::arg("world_size"), py::arg("reserve_bytes"),
        py::arg("half_bytes"), py::arg("first_epoch"));
  m.def("join_group", &join_group, py::arg("name"), py::arg("rank"), py::arg("own"), py::arg("descriptors"),
        py::arg("pids"), py::arg("timeout"), py::arg("oversubscribed"), py::arg("first_epoch"),
        py::arg("half_bytes"), py::arg("max_half_bytes"));
  m.def(
      "probe_latency", [](const std::string& name) { return require_group(name)->probe_latency(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("set_streaming",
        [](const std::string& name, bool streaming) { require_group(name)->set_streaming(streaming); });
  m.def("leave_group", &unregister_group);
  m.def("group_names", &group_names);
  m.def("describe_group", &describe_group);
  m.def("start_trace", &start_trace, py::arg("name"), py::arg("capacity"));
  m.def("stop_trace", &stop_trace, py::arg("name"));
  m.def(
      "refuse",
      [](const std::string& name, const std::string& text) {
        if (const auto group = find_group(name)) {
          const std::lock_guard lock(group->mutex());
          group->refuse(text);
        }
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("available_memory", &available_memory);
  m.def("raise_pending", &raise_pending);
  m.def("backend", [] { return static_cast<int>(backend()); });
  m.def("set_backend", [](int choice) { backend() = static_cast<Backend>(choice); });
  m.def("set_default_backend", [](int choice) { default_backend() = static_cast<Backend>(choice); });
  // Does this op run on shared memory? If not, the reason is noted as its path.
  m.def("is_fused", [](const std::string& op, const std::string& name) {
    return fused_group(op_named(op), name) != nullptr;
  });
  m.def("set_print_paths", &set_print_paths);
  m.def("note_path", &note_python_path, py::arg("op"), py::arg("algorithm"), py::arg("reason"),
        py::arg("fused"));
  m.def("last_path", [] {
    const Path path = last_path();
    return py::make_tuple(op_name(path.op), path.algorithm, path.reason, path.fused);
  });
  set_interrupt_check(&signal_handler_raised);
}
