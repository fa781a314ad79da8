#include "runtime/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/waiting.h"

namespace interlace {
namespace {

std::string format_call(const Call& call, int64_t extent) {
  std::string text = op_name(call.op);
  if (call.op == Op::kRefused || call.op == Op::kNone) return text;
  text += std::string(" ") + dtype_name(call.dtype) + " [";
  for (uint32_t i = 0; i < call.ndim; ++i) {
    const int64_t size = call.shape[i] == kGatheredDim ? extent : call.shape[i];
    text += (i ? ", " : "") + (size == kAnySize ? "*" : std::to_string(size));
  }
  text += "]";
  if (call.columns) text += " N=" + std::to_string(call.columns);
  return text + " dim=" + std::to_string(call.dim) + " weights=" + std::to_string(call.weights);
}

}  // namespace

Group::Group(GroupOptions options, Segment own, std::vector<Segment> peers)
    : options_(std::move(options)), epoch_(options_.first_epoch) {
  const int me = options_.rank;
  for (int r = 0; r < options_.world_size; ++r) {
    segments_.push_back(std::move(r == me ? own : peers[r]));
    pidfds_.push_back(r == me ? -1 : open_pidfd(options_.pids[r]));
    entered_seen_[r] = epoch_;
    const ControlPage& control = page(r);
    if (control.magic != kSegmentMagic || control.layout_version != kLayoutVersion ||
        control.rank != static_cast<uint32_t>(r)) {
      throw CollectiveFailure(FailureKind::kInvalid,
                              "interlace: rank " + std::to_string(r) +
                                  " runs another version of interlace; install the same one");
    }
  }
  half_bytes_ = options_.half_bytes;
  for (Segment& segment : segments_) segment.populate(kControlBytes + 2 * half_bytes_);
}

Group::~Group() {
  page(rank()).left.store(1, std::memory_order_release);
  for (int channel = 0; channel < kChannels; ++channel) {
    ProgressLine& line = line_of(rank(), static_cast<Channel>(channel));
    wake_all(line.value);
    wake_all(line.entered);
  }
  for (int descriptor : pidfds_) {
    if (descriptor >= 0) close(descriptor);
  }
}

void prepare_control_page(const Segment& segment, int rank, int world_size, uint32_t first_epoch) {
  auto& control = *reinterpret_cast<ControlPage*>(segment.base());
  control.rank = rank;
  control.world_size = world_size;
  control.pid = getpid();
  for (ProgressLine& line : control.lines) {
    line.value.store(progress_word(first_epoch, kMaxChunk));
    line.entered.store(first_epoch);
    for (auto& epoch : line.abandoned) epoch.store(first_epoch);
  }
  control.layout_version = kLayoutVersion;
  control.magic = kSegmentMagic;
}

std::string Group::where() const {
  return std::string(op_name(call_.op)) + " on group '" + name() + "', rank " + std::to_string(rank()) +
         " of " + std::to_string(world_size());
}

// Take the next epoch, once every peer has finished the last one that used its half.
void Group::advance() {
  if (!broken_.empty()) {
    throw CollectiveFailure(FailureKind::kAborted, "group '" + name() + "' is broken: " + broken_ +
                                                       "; call interlace.destroy and start again");
  }
  if (inherited()) {
    throw CollectiveFailure(
        FailureKind::kInvalid,
        "interlace: this process was forked from one that holds groups; start workers with the "
        "spawn method, or use interlace in the parent only");
  }
  ++epoch_;
  std::fill(std::begin(met_), std::end(met_), false);
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank() || reached(entered_seen_[peer], epoch_ - 1)) continue;
    try {
      wait_entered(peer, epoch_ - 1);
    } catch (...) {
      // the peer is two calls behind: this epoch cannot even be refused without overwriting what it still needs
      mark_broken("rank " + std::to_string(peer) + " is two calls behind");
      throw;
    }
  }
}

void Group::post(int64_t extent, const int64_t* splits) {
  ControlPage& mine = page(rank());
  const uint32_t half = parity(epoch_);
  mine.calls[half] = call_;
  if (splits != nullptr) std::copy_n(splits, world_size(), mine.splits[half]);
  ProgressLine& line = mine.lines[0];
  fingerprint_ = call_.fingerprint();
  line.fingerprint[half] = fingerprint_;
  // an epoch number comes round again after 2^32 calls: what was abandoned then must not count now
  for (ProgressLine& each : mine.lines) each.abandoned[half].store(epoch_ - 1, std::memory_order_relaxed);
  line.extent[half] = extent;
  // release: fingerprint, extent, splits become visible to a peer that sees this epoch entered
  store_and_wake(line.entered, line.waiters, epoch_);
}

void Group::begin(const Call& call, int64_t extent, const int64_t* splits) {
  call_ = call;
  call_.half_bytes = half_bytes_;
  ++epochs_in_op_;
  if (trace_ != nullptr) trace_->enter(call.op, epoch_ + 1);
  advance();
  in_call_ = true;
  post(extent, splits);
}

void Group::publish(Channel channel, uint32_t chunk) {
  const Stretch stretch(trace(), Work::kSignal, -1, chunk);
  ProgressLine& line = line_of(rank(), channel);
  // release: the bytes of chunks 1..chunk become visible to a peer that sees the word
  store_and_wake(line.value, line.waiters, progress_word(epoch_, chunk));
}

void Group::abandon(const std::string& text) noexcept {
  if (!in_call_) return;
  in_call_ = false;
  if (trace_ != nullptr) trace_->leave();
  const uint32_t half = parity(epoch_);
  FailureText& failure = page(rank()).failures[half];
  std::strncpy(failure.text, text.c_str(), sizeof(failure.text) - 1);
  failure.epoch = epoch_;
  for (int channel = 0; channel < kChannels; ++channel) {
    ProgressLine& line = line_of(rank(), static_cast<Channel>(channel));
    line.abandoned[half].store(epoch_, std::memory_order_relaxed);
    // release: whoever is let through by this word sees that the epoch was abandoned, and why
    store_and_wake(line.value, line.waiters, progress_word(epoch_, kMaxChunk));
  }
}

void Group::fail_op(const std::exception& error) noexcept {
  const auto* failure = dynamic_cast<const CollectiveFailure*>(&error);
  if (failure == nullptr && !in_call_) return refuse(error.what());
  abandon(failure != nullptr ? failure->text() : error.what());
  // A rank that runs out of patience may leave while another completes the epoch. With one epoch an op both have
  // used up the same; in a longer op they have not, and the next calls would meet the wrong partners.
  const bool alone = failure != nullptr && failure->kind() != FailureKind::kAborted;
  if (alone && (epochs_in_op_ > 1 || call_.op == Op::kGrow) && failure->kind() != FailureKind::kInvalid) {
    mark_broken("a call in several pieces was cut short: " + std::string(error.what()));
  }
}

void Group::refuse(const std::string& text) noexcept {
  try {
    Call call;
    call.op = Op::kRefused;
    begin(call, 0);
  } catch (const std::exception&) {
    return;  // the group is broken, and says so at the next call
  }
  abandon(text);
}

void Group::mark_broken(const std::string& why) {
  broken_ = why;
  ControlPage& mine = page(rank());
  mine.left.store(1, std::memory_order_release);
  for (ProgressLine& line : mine.lines) {
    wake_all(line.value);
    wake_all(line.entered);
  }
}

void Group::first_contact(int peer) {
  const ProgressLine& line = line_of(peer, Channel::kPartial);
  if (!reached(line.entered.load(std::memory_order_acquire), epoch_)) wait_entered(peer, epoch_);
  if (line.fingerprint[parity(epoch_)] != fingerprint_) fail_mismatch(peer);
  entered_seen_[peer] = epoch_;
  met_[peer] = true;
}

void Group::meet() {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank() || met_[peer]) continue;
    const ProgressLine& line = line_of(peer, Channel::kPartial);
    if (!reached(line.entered.load(std::memory_order_acquire), epoch_)) wait_entered(peer, epoch_);
    check_peer(line, peer);
  }
}

void Group::require(int64_t bytes) {
  if (bytes <= half_bytes_) return;
  const int64_t wanted = std::max((bytes + 4095) / 4096 * 4096, half_bytes_ + half_bytes_ / 2 / 4096 * 4096);
  Call call;
  call.op = Op::kGrow;
  call.dtype = Dtype::kBytes;
  call.columns = wanted;
  begin(call, 0);
  try {
    Segment& own = segments_[rank()];
    if (const char* reason = own.back(kControlBytes + 2 * wanted, world_size()); *reason != 0) {
      throw CollectiveFailure(FailureKind::kInvalid,
                              "interlace: the workspace of group '" + name() + "' cannot grow to 2 x " +
                                  std::to_string(wanted) + " bytes on rank " + std::to_string(rank()) + ": " +
                                  reason + "; split the call, or lower the number of ranks on this host");
    }
    publish(Channel::kPartial, 1);
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) wait(peer, Channel::kPartial, 1);
    }
  } catch (const CollectiveFailure& failure) {
    segments_[rank()].trim(kControlBytes + 2 * half_bytes_);
    abandon(failure.text());
    throw;
  }
  finish();
  // every rank has entered this epoch, so nobody still reads the old halves
  half_bytes_ = wanted;
  for (Segment& segment : segments_) segment.populate(kControlBytes + 2 * wanted);
}

void Group::fail_abandoned(int peer) {
  const FailureText& failure = page(peer).failures[parity(epoch_)];
  std::string text = where() + ": rank " + std::to_string(peer);
  if (page(peer).calls[parity(epoch_)].op == Op::kRefused) {
    text += " refused its call: ";
  } else {
    text += " gave up: ";
  }
  text += failure.epoch == epoch_ ? failure.text : "no reason given";
  throw CollectiveFailure(FailureKind::kAborted, text);
}

void Group::fail_mismatch(int peer) {
  const uint32_t half = parity(epoch_);
  if (page(peer).calls[half].op == Op::kRefused) {
    wait_slowly(peer, Channel::kPartial, progress_word(epoch_, kMaxChunk));  // its reason is on the way
    fail_abandoned(peer);
  }
  throw CollectiveFailure(FailureKind::kAborted,
                          where() + ": ranks make different calls (number " + std::to_string(epoch_) +
                              " of this group): rank " + std::to_string(rank()) + " " +
                              format_call(call_, extent(rank())) + ", rank " + std::to_string(peer) + " " +
                              format_call(page(peer).calls[half], extent(peer)) +
                              "; all ranks must call the same op with fitting shapes");
}

}  // namespace interlace
