#include "runtime/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "core/segment_layout.h"
#include "runtime/errors.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels answer EINVAL and pages fault in one by one
#endif

namespace interlace {
namespace {

[[noreturn]] void fail(const std::string& what) {
  throw CollectiveFailure(FailureKind::kInvalid, "interlace: " + what + ": " + std::strerror(errno));
}

char* map_shared(int descriptor, int64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (base == MAP_FAILED) return nullptr;
  madvise(base, bytes, MADV_DONTFORK);  // a forked child must not write into a live group
  return static_cast<char*>(base);
}

// A number alone in a file; the largest value when there is no file or it says "max".
int64_t read_limit(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : std::numeric_limits<int64_t>::max();
}

int64_t cgroup_available(const std::string& limit, const std::string& usage) {
  const int64_t most = read_limit(limit);
  const int64_t used = read_limit(usage);
  const int64_t none = std::numeric_limits<int64_t>::max();
  return most == none || used == none ? none : std::max<int64_t>(0, most - used);
}

}  // namespace

Segment Segment::create(int64_t reserve_bytes) {
  const int descriptor = memfd_create("interlace", MFD_CLOEXEC);
  if (descriptor < 0) fail("memfd_create");
  if (ftruncate(descriptor, reserve_bytes) != 0) {
    close(descriptor);
    fail("ftruncate to " + std::to_string(reserve_bytes) + " bytes");
  }
  char* base = map_shared(descriptor, reserve_bytes);
  if (base == nullptr) {
    close(descriptor);
    fail("mmap of " + std::to_string(reserve_bytes) + " bytes (is RLIMIT_AS set?)");
  }
  Segment segment(base, reserve_bytes, descriptor);
  if (const char* reason = segment.back(kControlBytes, 1); *reason != 0) fail(reason);
  return segment;
}

Segment Segment::attach(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) fail("fstat of a peer's segment");
  char* base = map_shared(descriptor, status.st_size);
  if (base == nullptr) fail("mmap of a peer's segment");
  return Segment(base, status.st_size, -1);
}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    reset();
    base_ = std::exchange(other.base_, nullptr);
    reserved_ = std::exchange(other.reserved_, 0);
    backed_ = std::exchange(other.backed_, 0);
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

Segment::~Segment() { reset(); }

void Segment::reset() {
  if (base_ != nullptr) munmap(base_, reserved_);
  base_ = nullptr;
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

const char* Segment::back(int64_t bytes, int sharers) {
  if (bytes <= backed_) return "";
  if (bytes > reserved_) return "the workspace is larger than the reserved address space";
  if (bytes - backed_ > available_memory() / sharers) return "not enough memory is left";
  if (fallocate(descriptor_, 0, backed_, bytes - backed_) != 0) {
    return errno == ENOSPC || errno == ENOMEM ? "no memory is left for shared pages" : "fallocate failed";
  }
  backed_ = bytes;
  return "";
}

void Segment::trim(int64_t bytes) {
  if (bytes >= backed_) return;
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, bytes, backed_ - bytes);
  backed_ = bytes;
}

void Segment::populate(int64_t bytes) { madvise(base_, bytes, MADV_POPULATE_WRITE); }

int64_t available_memory() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream file("/proc/meminfo");
  for (std::string key; file >> key;) {
    int64_t kib = 0;
    file >> kib;
    if (key == "MemAvailable:") {
      available = kib * 1024;
      break;
    }
    file.ignore(64, '\n');
  }
  available =
      std::min(available, cgroup_available("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"));
  return std::min(available, cgroup_available("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                              "/sys/fs/cgroup/memory/memory.usage_in_bytes"));
}

}  // namespace interlace
