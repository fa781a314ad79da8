#include "runtime/trace.h"

#include <time.h>

#include <algorithm>

namespace interlace {
namespace {

uint32_t thread_number() {
  static std::atomic<uint32_t> next{0};
  thread_local const uint32_t mine = next.fetch_add(1);
  return mine;
}

}  // namespace

int64_t Trace::now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void Trace::enter(Op op, uint32_t epoch) {
  op_ = op;
  epoch_ = epoch;
  entered_ = now();
}

void Trace::leave() {
  if (entered_ != 0) add(Work::kCall, entered_, -1, 0);
  entered_ = 0;
}

void Trace::add(Work work, int64_t begin, int32_t peer, uint32_t part) {
  // relaxed: whoever reads the events holds the group's lock, which the call held too
  const int64_t at = taken_.fetch_add(1, std::memory_order_relaxed);
  if (at >= static_cast<int64_t>(events_.size())) return;
  events_[at] = {begin, now(), epoch_, part, peer, thread_number(), op_, work};
}

std::vector<TraceEvent> Trace::events() const {
  const int64_t count = std::min(taken_.load(), static_cast<int64_t>(events_.size()));
  return {events_.begin(), events_.begin() + count};
}

int64_t Trace::dropped() const {
  return std::max<int64_t>(0, taken_.load() - static_cast<int64_t>(events_.size()));
}

}  // namespace interlace
