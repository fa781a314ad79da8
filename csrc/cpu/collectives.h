// Plain collectives over the workspace, below the tensors. Each takes as many epochs as the workspace needs.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "core/schedule.h"
#include "runtime/group.h"

namespace interlace {

// out[i] = sum over ranks of in[i]. The algorithm follows from the size.
void all_reduce_flat(Group& group, const Call& call, Dtype dtype, const char* in, char* out, int64_t n);

// in [rows][width] on every rank -> out: rows parts[rank] of the sum over ranks.
void reduce_scatter_rows(Group& group, const Call& call, Dtype dtype, const char* in, char* out,
                         const std::vector<Range>& parts, int64_t width);
std::vector<Range> chunk_ranges(int64_t rows, int world_size);              // as torch.chunk cuts
std::vector<Range> consecutive_ranges(const std::vector<int64_t>& lengths);  // one after the other

// Rows of every rank, in rank order. rows[r] is what rank r brings; width in bytes.
void all_gather_rows(Group& group, const Call& call, const char* in, char* out,
                     const std::vector<int64_t>& rows, int64_t width);

// Lengths that the ranks bring to this epoch, once they have met.
std::vector<int64_t> extents_of(const Group& group);
// The same, as an epoch of its own.
std::vector<int64_t> exchange_extents(Group& group, const Call& call, int64_t extent);

// Row blocks for every rank: in [sum send][width bytes] -> out [sum receive][width bytes].
void all_to_all_rows(Group& group, const Call& call, const char* in, char* out,
                     const std::vector<int64_t>& send, const std::vector<int64_t>& receive, int64_t width);

}  // namespace interlace
