// Memory a thread keeps between calls: fresh pages cost ten times the work done in them.
#pragma once

#include <cstdint>

namespace interlace {

// A buffer from this thread's pool, for as long as the lease lives. 64-byte aligned, contents undefined.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(int64_t bytes);
  Scratch(Scratch&& other) noexcept { *this = static_cast<Scratch&&>(other); }
  Scratch& operator=(Scratch&& other) noexcept;
  ~Scratch();
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

int64_t scratch_bytes();  // held by all threads of this process, leased or not

}  // namespace interlace
