// What this rank did when: pieces of work, signals and waits of a group's calls. Nothing is recorded, and no clock is
// read, unless a trace was started: then every piece costs two readings of the clock.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/call.h"

namespace interlace {

enum class Work : uint8_t {
  kCall,  // one epoch, from entering it to having heard from everybody
  kProduct,  // tiles of a product, those written where peers read them included
  kStage,  // copies into the own half, for peers to read
  kSignal,  // a release of chunks
  kWait,  // for a peer's signal that was not there yet
  kSum,  // own and peers' parts added and stored
  kPull,  // finished bytes copied out of a peer's half
};

constexpr const char* work_name(Work work) {
  switch (work) {
    case Work::kCall: return "call";
    case Work::kProduct: return "product";
    case Work::kStage: return "stage";
    case Work::kSignal: return "signal";
    case Work::kWait: return "wait";
    case Work::kSum: return "sum";
    case Work::kPull: break;
  }
  return "pull";
}

struct TraceEvent {
  int64_t begin = 0;  // ns of CLOCK_MONOTONIC, which all processes of a host share
  int64_t end = 0;
  uint32_t epoch = 0;
  uint32_t part = 0;  // chunk of a signal or a wait, unit or panel of a product
  int32_t peer = -1;  // whose bytes; -1 for one's own
  uint32_t thread = 0;  // in order of first appearance in this process
  Op op = Op::kNone;
  Work work = Work::kCall;
};

// Room for a number of events, then only a count of those that did not fit. Started and taken away under the group's
// lock, when no call runs; the threads of one call add to it without one.
class Trace {
 public:
  explicit Trace(int64_t capacity) : events_(capacity) {}
  void enter(Op op, uint32_t epoch);
  void leave();
  void add(Work work, int64_t begin, int32_t peer, uint32_t part);
  std::vector<TraceEvent> events() const;
  int64_t dropped() const;

  static int64_t now();

 private:
  std::vector<TraceEvent> events_;
  std::atomic<int64_t> taken_{0};
  Op op_ = Op::kNone;
  uint32_t epoch_ = 0;
  int64_t entered_ = 0;
};

// Times one piece of work, and after `turn` the next one. Without a trace it does nothing.
class Stretch {
 public:
  Stretch(Trace* trace, Work work, int32_t peer = -1, int64_t part = 0)
      : trace_(trace), begin_(trace == nullptr ? 0 : Trace::now()), peer_(peer), work_(work) {
    part_ = static_cast<uint32_t>(part);
  }
  ~Stretch() { record(); }
  Stretch(const Stretch&) = delete;

  void turn(Work next) {
    if (trace_ == nullptr) return;
    record();
    work_ = next;
    begin_ = Trace::now();
  }

 private:
  void record() const {
    if (trace_ != nullptr) trace_->add(work_, begin_, peer_, part_);
  }

  Trace* trace_;
  int64_t begin_;
  int32_t peer_;
  uint32_t part_;
  Work work_;
};

}  // namespace interlace
