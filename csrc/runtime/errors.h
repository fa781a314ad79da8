// Failures of a collective, as C++ exceptions. The prefix of what() tells Python which class to raise.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace interlace {

enum class FailureKind { kTimeout, kAborted, kInterrupted, kInvalid };

class CollectiveFailure : public std::runtime_error {
 public:
  CollectiveFailure(FailureKind kind, const std::string& text)
      : std::runtime_error(prefix(kind) + text), kind_(kind), text_(text) {}
  FailureKind kind() const { return kind_; }
  const std::string& text() const { return text_; }  // without the prefix: what peers are told

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
  std::string text_;
};

// A mistake of the caller, found before the first signal.
class ArgumentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts> [[noreturn]] void fail_argument(const char* python_class, const Parts&... parts) {
  std::ostringstream text;
  text << python_class << ": ";
  (text << ... << parts);
  throw ArgumentError(text.str());
}

template <class... Parts> void check_value(bool condition, const Parts&... parts) {
  if (!condition) fail_argument("ValueError", parts...);
}

template <class... Parts> void check_type(bool condition, const Parts&... parts) {
  if (!condition) fail_argument("TypeError", parts...);
}

}  // namespace interlace
