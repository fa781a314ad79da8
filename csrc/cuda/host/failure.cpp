#include "cuda/host/failure.h"

namespace interlace {

DeviceFailure read_failure(const HostPage& page) {
  const uint32_t state = __atomic_load_n(&page.failure.state, __ATOMIC_ACQUIRE);
  if (state == static_cast<uint32_t>(FailureState::kNone)) return {};
  DeviceFailure failure = page.failure;
  failure.state = state;
  return failure;
}

std::string describe_failure(const DeviceFailure& failure) {
  const std::string where =
      std::string(op_name(static_cast<Op>(failure.op))) + ", rank " + std::to_string(failure.rank) + ": ";
  const std::string peer = "rank " + std::to_string(failure.peer);
  // chunk 0: the peer's block of the same number; others: what has this number in core/gemm_schedule.h, counted from 1
  const std::string chunk =
      failure.tile == 0 ? "0 (block " + std::to_string(failure.block) + ")" : std::to_string(failure.tile);
  const std::string epochs =
      "wanted epoch " + std::to_string(failure.want) + ", seen epoch " + std::to_string(failure.seen);
  switch (static_cast<FailureState>(failure.state)) {
    case FailureState::kNone: return "no failure";
    case FailureState::kTimedOut:
      return where + "no answer from " + peer + ", chunk " + chunk + ": " + epochs;
    case FailureState::kAborted: break;
  }
  const std::string who = failure.peer == failure.rank ? "this rank" : peer;
  return where + who + " gave up; this rank was at chunk " + chunk + ": " + epochs;
}

void request_abort(HostPage& page) { __atomic_store_n(&page.abort_request, 1u, __ATOMIC_RELAXED); }

}  // namespace interlace
