// What a kernel recorded when it left early, in words.
#pragma once

#include <string>

#include "cuda/kernels/segment.h"

namespace interlace {

// The record in `page`, or one of state kNone. Acquire: the fields are those that belong to the state.
DeviceFailure read_failure(const HostPage& page);

std::string describe_failure(const DeviceFailure& failure);

// Make the waiting kernels of the page's rank leave.
void request_abort(HostPage& page);

}  // namespace interlace
