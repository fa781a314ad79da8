// A group of ranks on one host: segments, epochs, signals. The protocol of core/signal.h, as a class.
//
//   group.begin(call, extent)          one epoch of this group is ours; peers can see what we are about to do
//     group.half(r) + offset           staging of rank r for this epoch
//     group.publish(channel, chunk)    release: the bytes of chunks 1..chunk are visible to who sees the word
//     group.wait(peer, channel, chunk) acquire: the peer's bytes of chunks 1..chunk are visible here
//   group.finish()                     or group.abandon(...) when something threw
//
// Why no barrier: entering e says "I have finished reading e - 1". A rank writes the half of e only when every peer
// has entered e - 1, that is, finished reading e - 2, the last epoch that used this half. Every call hears from every
// peer, so this is normally known already and costs nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/segment_layout.h"
#include "runtime/errors.h"
#include "runtime/segment.h"
#include "runtime/trace.h"

namespace interlace {

uint32_t fork_generation();  // changes in a forked child: a group made before the fork belongs to the parent

struct GroupOptions {
  std::string name;
  int rank = 0;
  int world_size = 1;
  std::vector<int> pids;  // of every rank, for pidfds
  double timeout_seconds = 300;  // how long a rank waits for a peer
  bool oversubscribed = false;  // more waiting threads than cores: yield early
  uint32_t first_epoch = 0;
  int64_t half_bytes = 0;  // first size of one half of the staging area
  int64_t max_half_bytes = 0;  // calls that need more are cut into pieces
};

// Which way a call went; read by interlace.last_path().
struct Path {
  Op op = Op::kNone;
  const char* algorithm = "";
  const char* reason = "";
  bool fused = false;
};

// Write the control page of an own, new segment. Before its descriptor is sent to the peers.
void prepare_control_page(const Segment& segment, int rank, int world_size, uint32_t first_epoch);

class Group {
 public:
  Group(GroupOptions options, Segment own, std::vector<Segment> peers);
  ~Group();
  Group(const Group&) = delete;

  const std::string& name() const { return options_.name; }
  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  uint32_t epoch() const { return epoch_; }
  int64_t half_bytes() const { return half_bytes_; }
  int64_t max_half_bytes() const { return options_.max_half_bytes; }
  int64_t bytes_backed() const { return segments_[rank()].backed(); }
  std::mutex& mutex() { return mutex_; }
  // In a forked child the group is the parent's: its memory is not mapped here.
  bool inherited() const { return generation_ != fork_generation(); }

  // An op takes one epoch, or several when it is cut into pieces or the workspace grows first.
  void start_op() { epochs_in_op_ = 0; }
  void begin(const Call& call, int64_t extent, const int64_t* splits = nullptr);
  // End of an epoch. Hears from peers this call had nothing to read from: the next epochs rely on it.
  void finish() {
    meet();
    in_call_ = false;
    if (trace_ != nullptr) trace_->leave();
  }
  // Leave the current epoch with an error; peers in it raise with this text.
  void abandon(const std::string& text) noexcept;
  // What an op does with any error: peers in the same call hear of it, and no rank is left a call behind.
  void fail_op(const std::exception& error) noexcept;
  // An argument error found before begin(): use up the epoch, so that peers in the same call raise and all go on.
  void refuse(const std::string& text) noexcept;

  char* half(int peer) const { return segments_[peer].base() + kControlBytes + parity(epoch_) * half_bytes_; }
  void publish(Channel channel, uint32_t chunk);
  void wait(int peer, Channel channel, uint32_t chunk) {
    const uint32_t want = progress_word(epoch_, chunk);
    ProgressLine& line = line_of(peer, channel);
    if (!reached(line.value.load(std::memory_order_acquire), want)) wait_slowly(peer, channel, want);
    check_peer(line, peer);
  }
  // Wait until every peer has begun this epoch with the same call. Needed by calls whose work depends on extents.
  void meet();
  int64_t extent(int peer) const { return line_of(peer, Channel::kPartial).extent[parity(epoch_)]; }
  int64_t split(int peer, int destination) const { return page(peer).splits[parity(epoch_)][destination]; }

  // Make every rank's half at least `bytes` large. `bytes` must be equal on all ranks; uses epochs of its own when it
  // has to grow. Call outside begin()/finish().
  void require(int64_t bytes);

  void mark_broken(const std::string& why);

  // Nanoseconds a flag takes from one core to another, between ranks 0 and 1; 0 on other ranks or when it took too
  // long to measure. All ranks call it once, before the first op.
  double probe_latency();
  // Should tiles for peers bypass this core's cache? Yes between cores that share no cache: a normal store would
  // fetch the line from afar first. rank 0's probe decides at first; virtual machines move their cores, so ops keep
  // looking. Ranks may differ in this: it changes neither values nor signals.
  void set_streaming(bool streaming) { streaming_ = streaming; }
  // Time one look at a peer's progress line, which the peer has written since the last one.
  void sample_distance(int peer);
  bool streaming() const { return streaming_; }
  double line_nanoseconds() const { return line_nanoseconds_; }

  // Where calls record what they do; null when nobody asked. Start and take it under the mutex.
  Trace* trace() const { return trace_.get(); }
  void start_trace(int64_t capacity) { trace_ = std::make_unique<Trace>(capacity); }
  std::unique_ptr<Trace> take_trace() { return std::move(trace_); }

 private:
  ControlPage& page(int peer) const { return *reinterpret_cast<ControlPage*>(segments_[peer].base()); }
  ProgressLine& line_of(int peer, Channel channel) const {
    return page(peer).lines[static_cast<int>(channel)];
  }
  void check_peer(const ProgressLine& line, int peer) {
    if (line.abandoned[parity(epoch_)].load(std::memory_order_relaxed) == epoch_) fail_abandoned(peer);
    if (!met_[peer]) first_contact(peer);
  }
  void first_contact(int peer);
  void advance();
  void post(int64_t extent, const int64_t* splits);
  void wait_entered(int peer, uint32_t epoch);
  void wait_slowly(int peer, Channel channel, uint32_t want);
  struct Wait;
  void sleep_until(const Wait& wait);
  void check_liveness(const Wait& wait, double waited);
  [[noreturn]] void fail_abandoned(int peer);
  [[noreturn]] void fail_mismatch(int peer);
  std::string where() const;

  GroupOptions options_;
  std::vector<Segment> segments_;  // by rank, own included
  std::vector<int> pidfds_;
  std::mutex mutex_;  // one call of a group at a time
  uint32_t epoch_ = 0;
  bool in_call_ = false;
  int epochs_in_op_ = 0;
  int64_t half_bytes_ = 0;
  bool met_[kMaxRanks] = {};  // first contact made in this epoch
  uint32_t entered_seen_[kMaxRanks] = {};  // latest epoch each peer is known to have entered
  Call call_;
  uint64_t fingerprint_ = 0;
  bool streaming_ = false;
  double line_nanoseconds_ = 0;  // what looks at peers' lines took lately
  uint32_t generation_ = fork_generation();
  std::string broken_;
  std::unique_ptr<Trace> trace_;
};

// Groups of this process by name. Ops look a group up at each call.
void register_group(std::shared_ptr<Group> group);
void unregister_group(const std::string& name);
std::shared_ptr<Group> find_group(const std::string& name);  // null when there is none
std::vector<std::string> group_names();

// Asked every few milliseconds of waiting; true when a signal handler raised. Set by the Python bindings.
void set_interrupt_check(bool (*check)());
// Which way the ops of this thread shall go, and which way the last one went.
// kDecomposed: Python sends what has such a form there; the rest goes as with kAuto.
enum class Backend : int { kAuto, kFused, kReference, kDecomposed };
Backend& backend();  // this thread's
Backend& default_backend();  // what a thread starts with
Path& last_path();
void note_path(const Path& path);  // as this thread's last; printed when new and asked for
void set_print_paths(bool print);  // INTERLACE_PRINT_CONFIG

// The group when the op shall run on shared memory; null sends the call to torch.distributed and notes why. Throws
// when the thread insists on shared memory and there is none.
std::shared_ptr<Group> fused_group(Op op, const std::string& name);

}  // namespace interlace
