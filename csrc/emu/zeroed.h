// Memory of the emulator itself.
#pragma once

#include <cstdlib>
#include <memory>
#include <type_traits>

namespace interlace::emu {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// An array of zeros whose pages cost nothing until they are used. No constructor runs, so that hidden code may be the
// only one to touch it.
template <typename T> std::unique_ptr<T[], Free> zeroed(size_t count) {
  static_assert(std::is_trivially_destructible_v<T>);
  return std::unique_ptr<T[], Free>(static_cast<T*>(std::calloc(count, sizeof(T))));
}

}  // namespace interlace::emu
