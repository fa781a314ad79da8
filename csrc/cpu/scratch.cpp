#include "cpu/scratch.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

namespace interlace {
namespace {

std::atomic<int64_t> held{0};

struct Pool {
  std::vector<std::pair<char*, int64_t>> idle;
  ~Pool() {
    for (auto& [data, bytes] : idle) {
      std::free(data);
      held.fetch_sub(bytes);
    }
  }
};

Pool& pool() {
  thread_local Pool instance;
  return instance;
}

}  // namespace

// The smallest idle buffer that is large enough; failing that, the largest gives way to a larger one.
Scratch::Scratch(int64_t bytes) {
  auto& idle = pool().idle;
  auto best = idle.end();
  for (auto it = idle.begin(); it != idle.end(); ++it) {
    const bool better =
        best == idle.end() ||
        (best->second < bytes ? it->second > best->second : it->second >= bytes && it->second < best->second);
    if (better) best = it;
  }
  if (best != idle.end()) {
    std::tie(data_, bytes_) = *best;
    idle.erase(best);
  }
  if (bytes_ >= bytes) return;
  std::free(data_);
  held.fetch_sub(bytes_);
  const int64_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
  data_ = static_cast<char*>(std::aligned_alloc(4096, rounded));
  bytes_ = data_ == nullptr ? 0 : rounded;
  if (data_ == nullptr) throw std::bad_alloc();
  held.fetch_add(rounded);
}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Scratch::~Scratch() {
  if (data_ != nullptr) pool().idle.emplace_back(data_, bytes_);
}

int64_t scratch_bytes() { return held.load(); }

}  // namespace interlace
