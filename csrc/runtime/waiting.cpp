#include "runtime/waiting.h"

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <string>

#include "runtime/group.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace interlace {
namespace {

// measured: 20k pauses are about 0.5 ms, longer than any skew worth keeping a core busy for
constexpr int kSpins = 20000;
// with more waiters than cores a spinning rank keeps the one it waits for from running
constexpr int kSpinsOversubscribed = 64;
constexpr double kYieldSeconds = 1e-3;
constexpr long kSliceNanoseconds =
    20'000'000;  // how often a sleeper looks at the deadline, the peer, signals

std::atomic<bool (*)()> interrupt_check{nullptr};
std::atomic<uint32_t> fork_count{0};  // how many forks lie between the first process and this one

void pause_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double seconds_now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

#if defined(__x86_64__)
// Ticks of the time stamp counter in a nanosecond, from one millisecond of both clocks.
double measure_clock() {
  unsigned core;
  const double start = seconds_now();
  const uint64_t before = __builtin_ia32_rdtscp(&core);
  while (seconds_now() - start < 1e-3) pause_once();
  const uint64_t ticks = __builtin_ia32_rdtscp(&core) - before;
  return static_cast<double>(ticks) / ((seconds_now() - start) * 1e9);
}

// Looks at a line that another core has just written: 40 to 60 ns where the two share a cache, 200 to 260 where not.
constexpr double kNearNanoseconds = 90;
constexpr double kFarNanoseconds = 130;
#endif

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

int open_pidfd(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

bool process_ended(int pidfd) {
  if (pidfd < 0) return false;
  pollfd descriptor{pidfd, POLLIN, 0};
  return poll(&descriptor, 1, 0) > 0;
}

void wake_all(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

void store_and_wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& waiters, uint32_t value) {
  // sequentially consistent: either this thread sees the sleeper's count, or the sleeper sees the new value
  word.exchange(value, std::memory_order_seq_cst);
  if (waiters.load(std::memory_order_seq_cst) != 0) wake_all(word);
}

void set_interrupt_check(bool (*check)()) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
  (void)registered;
  interrupt_check.store(check);
}

uint32_t fork_generation() { return fork_count.load(std::memory_order_relaxed); }

struct Group::Wait {
  int peer;
  std::atomic<uint32_t>& word;
  std::atomic<uint32_t>& waiters;
  uint32_t want;
  bool progress;  // waits for a chunk; else for an entry
  Channel channel;

  uint32_t seen() const { return word.load(std::memory_order_acquire); }
  bool ready() const { return reached(seen(), want); }
};

void Group::wait_entered(int peer, uint32_t epoch) {
  ProgressLine& line = line_of(peer, Channel::kPartial);
  sleep_until({peer, line.entered, line.waiters, epoch, false, Channel::kPartial});
  entered_seen_[peer] = epoch;
}

void Group::wait_slowly(int peer, Channel channel, uint32_t want) {
  ProgressLine& line = line_of(peer, channel);
  sleep_until({peer, line.value, line.waiters, want, true, channel});
}

void Group::sleep_until(const Wait& wait) {
  const Stretch stretch(trace(), Work::kWait, wait.peer, wait.progress ? chunk_of(wait.want) : 0);
  const int spins = options_.oversubscribed ? kSpinsOversubscribed : kSpins;
  for (int i = 0; i < spins; ++i) {
    if (wait.ready()) return;
    pause_once();
  }
  const double start = seconds_now();
  while (options_.oversubscribed && seconds_now() - start < kYieldSeconds) {
    sched_yield();
    if (wait.ready()) return;
  }
  const timespec slice{0, kSliceNanoseconds};
  while (!wait.ready()) {
    check_liveness(wait, seconds_now() - start);
    wait.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = wait.word.load(std::memory_order_seq_cst);
    if (!reached(seen, wait.want)) futex(wait.word, FUTEX_WAIT, seen, &slice);
    wait.waiters.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Group::check_liveness(const Wait& wait, double waited) {
  const ProgressLine& entry = line_of(wait.peer, Channel::kPartial);
  const uint32_t half = parity(epoch_);
  // a peer that makes another call may never reach the chunk waited for
  if (wait.progress && !met_[wait.peer] && reached(entry.entered.load(std::memory_order_acquire), epoch_) &&
      entry.fingerprint[half] != fingerprint_ && page(wait.peer).calls[half].op != Op::kRefused) {
    fail_mismatch(wait.peer);
  }
  const std::string peer = "rank " + std::to_string(wait.peer);
  // the dead first, whoever they are: a peer that left did so because of them
  for (int r = 0; r < world_size(); ++r) {
    if (!process_ended(pidfds_[r]) || wait.ready()) continue;
    const std::string died =
        "rank " + std::to_string(r) + " (pid " + std::to_string(page(r).pid) + ") has ended";
    mark_broken(died);
    throw CollectiveFailure(FailureKind::kAborted, where() + ": " + died);
  }
  if (page(wait.peer).left.load(std::memory_order_acquire) != 0 && !wait.ready()) {
    mark_broken(peer + " has left the group");
    throw CollectiveFailure(FailureKind::kAborted, where() + ": " + peer + " has left the group");
  }
  if (auto check = interrupt_check.load(); check != nullptr && check()) {
    throw CollectiveFailure(FailureKind::kInterrupted,
                            where() + ": interrupted by a signal while waiting for " + peer);
  }
  if (waited > options_.timeout_seconds) {
    const uint32_t seen = wait.seen();
    std::string text = where() + ": waited " + std::to_string(waited).substr(0, 5) + " s for " + peer;
    if (wait.progress) {
      text += ", chunk " + std::to_string(chunk_of(wait.want)) + ": wanted epoch " + std::to_string(epoch_) +
              " (word " + std::to_string(wait.want) + "), seen word " + std::to_string(seen) + " (epoch " +
              std::to_string(entry.entered.load()) + " entered, chunk " + std::to_string(chunk_of(seen)) +
              ")";
    } else {
      text += " to begin, chunk 0: wanted epoch " + std::to_string(wait.want) + ", seen epoch " +
              std::to_string(seen);
    }
    throw CollectiveFailure(FailureKind::kTimeout,
                            text + "; is that rank still running? INTERLACE_TIMEOUT sets the limit");
  }
}

void Group::sample_distance(int peer) {
#if defined(__x86_64__)
  // between "it was in my cache", which says nothing, and "I was interrupted"
  constexpr double kLeast = 20, kMost = 1000;
  static const double cycles_per_nanosecond = measure_clock();
  unsigned core;
  const uint64_t before = __builtin_ia32_rdtscp(&core);
  line_of(peer, Channel::kPartial).value.load(std::memory_order_acquire);
  const double taken = static_cast<double>(__builtin_ia32_rdtscp(&core) - before) / cycles_per_nanosecond;
  if (taken < kLeast || taken > kMost) return;
  line_nanoseconds_ = line_nanoseconds_ == 0 ? taken : 0.875 * line_nanoseconds_ + 0.125 * taken;
  // two thresholds: a distance in between keeps the choice
  if (line_nanoseconds_ > kFarNanoseconds) streaming_ = true;
  if (line_nanoseconds_ < kNearNanoseconds) streaming_ = false;
#else
  (void)peer;
#endif
}

double Group::probe_latency() {
  constexpr uint32_t kRounds = 256;
  constexpr double kPatience = 0.05;  // seconds; a probe that takes longer says nothing
  if (rank() > 1 || world_size() < 2 || options_.oversubscribed) return 0;
  std::atomic<uint32_t>& mine = page(rank()).probe;
  const std::atomic<uint32_t>& theirs = page(1 - rank()).probe;
  auto heard = [&](uint32_t round, double give_up) {
    for (int i = 0; theirs.load(std::memory_order_acquire) < round; ++i) {
      pause_once();
      if (i % 1024 == 1023 && seconds_now() > give_up) return false;
    }
    return true;
  };
  // the first round only finds out that both are here
  double start = 0;
  for (uint32_t round = 1; round <= kRounds + 1; ++round) {
    const double give_up = seconds_now() + kPatience;
    if (rank() == 0) mine.store(round, std::memory_order_release);
    if (!heard(round, give_up)) return 0;
    if (rank() == 1) mine.store(round, std::memory_order_release);
    if (round == 1) start = seconds_now();
  }
  return (seconds_now() - start) / (2 * kRounds) * 1e9;
}

}  // namespace interlace
