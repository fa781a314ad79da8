#include "cpu/collectives.h"

#include <algorithm>
#include <cstring>

#include "core/heuristics.h"
#include "core/schedule.h"
#include "cpu/isa.h"

namespace interlace {
namespace {

// parts begin on cache lines, so that two ranks never write the same one
constexpr int64_t kAlign = 64;

int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

// Largest piece of a call that a half may hold, growing the workspace up to its cap first.
int64_t piece_bytes(Group& group, int64_t wanted, int64_t least) {
  const int64_t target = std::max(least, std::min(wanted, group.max_half_bytes()));
  group.require(target);
  return target;
}

// Bytes into the own half, for peers to read.
void stage(Group& group, char* to, const char* from, int64_t bytes) {
  const Stretch stretch(group.trace(), Work::kStage);
  std::memcpy(to, from, bytes);
}

// Finished bytes of a rank into the output.
void pull(Group& group, int peer, char* to, const char* from, int64_t bytes) {
  const Stretch stretch(group.trace(), Work::kPull, peer);
  std::memcpy(to, from, bytes);
}

void sum(Group& group, Dtype dtype, void* out, const void* const* parts, int64_t n) {
  const Stretch stretch(group.trace(), Work::kSum);
  isa().sum(dtype, out, parts, group.world_size(), n);
}

// One signal: everybody stages everything, everybody sums everything.
void one_shot(Group& group, Dtype dtype, const char* in, char* out, int64_t n) {
  const void* parts[kMaxRanks];
  stage(group, group.half(group.rank()), in, n * dtype_size(dtype));
  group.publish(Channel::kPartial, 1);
  for (int r = 0; r < group.world_size(); ++r) {
    if (r != group.rank()) group.wait(r, Channel::kPartial, 1);
    parts[r] = r == group.rank() ? in : group.half(r);
  }
  sum(group, dtype, out, parts, n);
}

// Two signals: every rank stages what others own, sums what it owns into its half and its output, pulls the rest.
void two_shot(Group& group, Dtype dtype, const char* in, char* out, int64_t n) {
  const int64_t size = dtype_size(dtype);
  const int me = group.rank();
  const int world = group.world_size();
  const int64_t step = round_up(ceil_div(n, world), kAlign / size);
  auto part = [&](int r) { return Range{std::min(n, r * step), std::min(n, (r + 1) * step)}; };
  char* mine = group.half(me);
  for (int k = 1; k < world; ++k) {
    const int owner = (me + k) % world;
    const Range range = part(owner);
    stage(group, mine + range.begin * size, in + range.begin * size, range.size() * size);
    group.publish(Channel::kPartial, static_cast<uint32_t>(k));
  }
  const Range own = part(me);
  const void* parts[kMaxRanks];
  for (int r = 0; r < world; ++r) {
    // rank r stages this part as its ((me - r) mod world)-th
    if (r != me) group.wait(r, Channel::kPartial, static_cast<uint32_t>((me - r + world) % world));
    parts[r] = (r == me ? in : group.half(r)) + own.begin * size;
  }
  sum(group, dtype, mine + own.begin * size, parts, own.size());
  group.publish(Channel::kFinal, 1);
  pull(group, me, out + own.begin * size, mine + own.begin * size, own.size() * size);
  for (int k = 1; k < world; ++k) {
    const int peer = (me + k) % world;
    const Range range = part(peer);
    group.wait(peer, Channel::kFinal, 1);
    pull(group, peer, out + range.begin * size, group.half(peer) + range.begin * size, range.size() * size);
  }
}

}  // namespace

void all_reduce_flat(Group& group, const Call& call, Dtype dtype, const char* in, char* out, int64_t n) {
  const int64_t size = dtype_size(dtype);
  const Choice choice = choose_all_reduce(n * size);
  // in a cache-sized piece the sums are still in L2 when they are copied out
  const int64_t piece = std::max<int64_t>(1, piece_bytes(group, n * size, kAlign) / size);
  for (int64_t first = 0; first < std::max<int64_t>(n, 1); first += piece) {
    const int64_t count = std::min(piece, n - first);
    group.begin(call, 0);
    if (choice.algorithm == Algorithm::kOneShot) {
      one_shot(group, dtype, in + first * size, out + first * size, count);
    } else {
      two_shot(group, dtype, in + first * size, out + first * size, count);
    }
    group.finish();
  }
}

std::vector<Range> chunk_ranges(int64_t rows, int world_size) {
  std::vector<Range> ranges;
  for (int r = 0; r < world_size; ++r) ranges.push_back(chunk_range(rows, world_size, r));
  return ranges;
}

std::vector<Range> consecutive_ranges(const std::vector<int64_t>& lengths) {
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (int64_t length : lengths) {
    ranges.push_back({begin, begin + length});
    begin += length;
  }
  return ranges;
}

void reduce_scatter_rows(Group& group, const Call& call, Dtype dtype, const char* in, char* out,
                         const std::vector<Range>& parts_by_rank, int64_t width) {
  const int64_t size = dtype_size(dtype);
  const int me = group.rank();
  const int world = group.world_size();
  // pieces cut every owner's part, elementwise
  int64_t longest = 0;
  for (const Range& range : parts_by_rank) longest = std::max(longest, range.size() * width);
  const int64_t piece =
      std::max<int64_t>(1, piece_bytes(group, world * longest * size, world * kAlign) / world / size);
  auto part = [&](int r) { return Range{parts_by_rank[r].begin * width, parts_by_rank[r].end * width}; };
  for (int64_t first = 0; first < std::max<int64_t>(longest, 1); first += piece) {
    group.begin(call, 0);
    auto clip = [&](int r) {
      const Range range = part(r);
      return Range{std::min(range.end, range.begin + first),
                   std::min(range.end, range.begin + first + piece)};
    };
    char* mine = group.half(me);
    for (int k = 1; k < world; ++k) {
      const int owner = (me + k) % world;
      const Range range = clip(owner);
      stage(group, mine + owner * piece * size, in + range.begin * size, range.size() * size);
      group.publish(Channel::kPartial, static_cast<uint32_t>(k));
    }
    const Range own = clip(me);
    const void* parts[kMaxRanks];
    for (int r = 0; r < world; ++r) {
      if (r != me) group.wait(r, Channel::kPartial, static_cast<uint32_t>((me - r + world) % world));
      parts[r] = r == me ? in + own.begin * size : group.half(r) + me * piece * size;
    }
    sum(group, dtype, out + (own.begin - part(me).begin) * size, parts, own.size());
    group.finish();
  }
}

std::vector<int64_t> extents_of(const Group& group) {
  std::vector<int64_t> extents;
  for (int r = 0; r < group.world_size(); ++r) extents.push_back(group.extent(r));
  return extents;
}

std::vector<int64_t> exchange_extents(Group& group, const Call& call, int64_t extent) {
  group.begin(call, extent);
  group.meet();
  std::vector<int64_t> extents = extents_of(group);
  group.finish();
  return extents;
}

void all_gather_rows(Group& group, const Call& call, const char* in, char* out,
                     const std::vector<int64_t>& rows, int64_t width) {
  const int me = group.rank();
  const int world = group.world_size();
  std::vector<int64_t> begin(world + 1, 0);
  for (int r = 0; r < world; ++r) begin[r + 1] = begin[r] + rows[r] * width;
  const int64_t longest = *std::max_element(rows.begin(), rows.end()) * width;
  const int64_t piece = std::max<int64_t>(1, piece_bytes(group, longest, kAlign));
  for (int64_t first = 0; first < std::max<int64_t>(longest, 1); first += piece) {
    group.begin(call, rows[me]);
    auto count = [&](int r) { return std::clamp<int64_t>(rows[r] * width - first, 0, piece); };
    if (count(me) > 0) stage(group, group.half(me), in + first, count(me));
    group.publish(Channel::kPartial, 1);
    if (count(me) > 0) pull(group, me, out + begin[me] + first, in + first, count(me));
    for (int k = 1; k < world; ++k) {
      const int peer = (me + k) % world;
      group.wait(peer, Channel::kPartial, 1);
      if (count(peer) > 0) pull(group, peer, out + begin[peer] + first, group.half(peer), count(peer));
    }
    group.finish();
  }
}

void all_to_all_rows(Group& group, const Call& call, const char* in, char* out,
                     const std::vector<int64_t>& send, const std::vector<int64_t>& receive, int64_t width) {
  const int me = group.rank();
  const int world = group.world_size();
  // first epoch: what everybody sends to everybody, so that sizes are checked and pieces are the same everywhere
  group.begin(call, 0, send.data());
  group.meet();
  int64_t longest = 0;
  for (int from = 0; from < world; ++from) {
    if (group.split(from, me) != receive[from]) {
      throw CollectiveFailure(FailureKind::kAborted,
                              "all_to_all: rank " + std::to_string(from) + " sends " +
                                  std::to_string(group.split(from, me)) + " rows to rank " +
                                  std::to_string(me) + ", which expects " + std::to_string(receive[from]) +
                                  "; make output_split_sizes the transpose of input_split_sizes");
    }
    for (int to = 0; to < world; ++to) longest = std::max(longest, group.split(from, to) * width);
  }
  group.publish(Channel::kPartial, 1);
  for (int peer = 0; peer < world; ++peer) {
    if (peer != me)
      group.wait(peer, Channel::kPartial, 1);  // everybody's sizes fit: nobody leaves after this
  }
  group.finish();
  const int64_t piece = std::max<int64_t>(1, piece_bytes(group, longest * world, kAlign * world) / world);
  for (int64_t first = 0; first < longest; first += piece) {
    group.begin(call, 0);
    auto count = [&](int64_t rows) { return std::clamp<int64_t>(rows * width - first, 0, piece); };
    int64_t offset = 0;
    int64_t own_offset = 0;
    for (int to = 0; to < world; ++to) {
      if (to == me) own_offset = offset;
      if (to != me && count(send[to]) > 0) {
        stage(group, group.half(me) + to * piece, in + offset + first, count(send[to]));
      }
      offset += send[to] * width;
    }
    group.publish(Channel::kPartial, 1);
    offset = 0;
    for (int from = 0; from < world; ++from) {
      if (from != me) group.wait(from, Channel::kPartial, 1);
      const char* source = from == me ? in + own_offset + first : group.half(from) + me * piece;
      if (count(receive[from]) > 0) pull(group, from, out + offset + first, source, count(receive[from]));
      offset += receive[from] * width;
    }
    group.finish();
  }
}

}  // namespace interlace
