// Failures of a collective, as C++ exceptions. The prefix of what() tells Python which class to raise.
#pragma once

#include <stdexcept>
#include <string>

namespace interlace {

enum class FailureKind { kTimeout, kAborted, kInterrupted, kInvalid };

class CollectiveFailure : public std::runtime_error {
 public:
  CollectiveFailure(FailureKind kind, const std::string& text)
      : std::runtime_error(prefix(kind) + text), kind_(kind) {}
  FailureKind kind() const { return kind_; }

 private:
  static std::string prefix(FailureKind kind) {
    switch (kind) {
      case FailureKind::kTimeout: return "CollectiveTimeout: ";
      case FailureKind::kAborted: return "CollectiveAborted: ";
      case FailureKind::kInterrupted: return "CollectiveInterrupted: ";
      case FailureKind::kInvalid: break;
    }
    return "";
  }
  FailureKind kind_;
};

}  // namespace interlace
