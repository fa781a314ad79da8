// interlace::all_reduce, all_gather, reduce_scatter, all_to_all, for CPU tensors.
#include <numeric>

#include "cpu/collectives.h"
#include "cpu/host.h"

namespace interlace {
namespace {

using torch::headeronly::ScalarType;

constexpr uint32_t kLengthsExchanged = 4;

// Sums need a number type; copies take any dtype as bytes.
int64_t element_size(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double:
    case ScalarType::Long:
    case ScalarType::ComplexFloat: return 8;
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Short: return 2;
    case ScalarType::ComplexDouble: return 16;
    default: return 1;
  }
}

const char* bytes_of(const Tensor& x) { return static_cast<const char*>(x.data_ptr()); }
char* mutable_bytes_of(Tensor& x) { return static_cast<char*>(x.data_ptr()); }

// Copies carry any dtype; the scalar type still has to agree between ranks.
Call describe_copy(Op op, const Tensor& x, int64_t dim) {
  return describe(op, x, dim, static_cast<int64_t>(x.scalar_type()), 0, 0, Dtype::kBytes);
}

Tensor all_reduce(const Tensor& x, const std::string& group_name) {
  const auto group = fused_group(Op::kAllReduce, group_name);
  if (group == nullptr) return call_python<Tensor>("interlace::all_reduce_reference", x, group_name);
  return in_group(*group, [&] {
    const Dtype dtype = summable_dtype(x, "all_reduce");
    const Tensor in = torch::stable::contiguous(x);
    Tensor out = empty_like_shape(in, shape_of(in));
    const Choice choice = choose_all_reduce(in.numel() * dtype_size(dtype));
    note_path(Op::kAllReduce, choice.algorithm, choice.reason);
    all_reduce_flat(*group, describe(Op::kAllReduce, in, 0, 0, 0, 0, dtype), dtype, bytes_of(in),
                    mutable_bytes_of(out), in.numel());
    return out;
  });
}

Tensor reduce_scatter(const Tensor& x, int64_t dim, const std::string& group_name,
                      const std::optional<int64_t>& length) {
  const auto group = fused_group(Op::kReduceScatter, group_name);
  if (group == nullptr)
    return call_python<Tensor>("interlace::reduce_scatter_reference", x, dim, group_name, length);
  return in_group(*group, [&] {
    const Dtype dtype = summable_dtype(x, "reduce_scatter");
    const int64_t at = wrap_dim(dim, x.dim(), "reduce_scatter", "dim");
    const Tensor in = torch::stable::contiguous(move_dim_to_front(x, at));
    Sizes shape = shape_of(in);
    const int64_t width = std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
    Call call = describe(Op::kReduceScatter, in, at, 0, 0, length.has_value() ? kLengthsExchanged : 0, dtype);
    std::vector<Range> parts = chunk_ranges(shape[0], group->world_size());
    if (length.has_value()) {
      parts = consecutive_ranges(exchange_extents(*group, call, *length));
      if (parts.back().end != shape[0]) {
        throw CollectiveFailure(FailureKind::kInvalid, "reduce_scatter: the lengths of the ranks add up to " +
                                                           std::to_string(parts.back().end) + ", dim " +
                                                           std::to_string(at) + " has " +
                                                           std::to_string(shape[0]));
      }
    }
    shape[0] = parts[group->rank()].size();
    Tensor out = empty_like_shape(in, shape);
    note_path(Op::kReduceScatter, Algorithm::kOneShot, "every rank sums its part of all ranks' staged rows");
    reduce_scatter_rows(*group, call, dtype, bytes_of(in), mutable_bytes_of(out), parts, width);
    return move_front_to_dim(out, at);
  });
}

Tensor all_gather(const Tensor& x, int64_t dim, const std::string& group_name,
                  const std::optional<int64_t>& gather_size) {
  const auto group = fused_group(Op::kAllGather, group_name);
  if (group == nullptr) {
    return call_python<Tensor>("interlace::all_gather_reference", x, dim, group_name, gather_size);
  }
  return in_group(*group, [&] {
    const int64_t at = wrap_dim(dim, x.dim(), "all_gather", "dim");
    const Tensor in = torch::stable::contiguous(move_dim_to_front(x, at));
    Call call = describe_copy(Op::kAllGather, in, at);
    call.shape[0] = kGatheredDim;
    std::vector<int64_t> extents;
    if (gather_size.has_value()) {
      // the total is known, and with it every length: no round to exchange them
      for (int r = 0; r < group->world_size(); ++r) {
        extents.push_back(chunk_range(*gather_size, group->world_size(), r).size());
      }
      call.total = *gather_size;
      check_value(extents[group->rank()] == in.size(0), "all_gather: gather_size=", *gather_size,
                  " gives rank ", group->rank(), " ", extents[group->rank()], " of dim ", at,
                  ", its shard has ", in.size(0));
    } else {
      extents = exchange_extents(*group, call, in.size(0));
    }
    Sizes shape = shape_of(in);
    shape[0] = std::accumulate(extents.begin(), extents.end(), int64_t{0});
    const int64_t width =
        std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>()) * element_size(in);
    Tensor out = empty_like_shape(in, shape);
    note_path(Op::kAllGather, Algorithm::kOneShot, "every rank copies what the others staged");
    all_gather_rows(*group, call, bytes_of(in), mutable_bytes_of(out), extents, width);
    return move_front_to_dim(out, at);
  });
}

Tensor all_to_all(const Tensor& x, const std::optional<Sizes>& output_split_sizes,
                  const std::optional<Sizes>& input_split_sizes, const std::string& group_name) {
  const auto group = fused_group(Op::kAllToAll, group_name);
  if (group == nullptr) {
    return call_python<Tensor>("interlace::all_to_all_reference", x, output_split_sizes, input_split_sizes,
                               group_name);
  }
  return in_group(*group, [&] {
    const int64_t world = group->world_size();
    check_value(x.dim() >= 1, "all_to_all: x is a scalar; expected [S, ..]");
    auto sizes = [&](const std::optional<Sizes>& given, const char* what) {
      if (given.has_value()) {
        check_value(static_cast<int64_t>(given->size()) == world, "all_to_all: ", what, " has ",
                    given->size(), " entries, expected world_size=", world);
        for (int64_t size : *given)
          check_value(size >= 0, "all_to_all: ", what, " has a negative size ", size);
        return *given;
      }
      check_value(x.size(0) % world == 0, "all_to_all: ", x.size(0),
                  " rows do not divide by world_size=", world, "; give ", what);
      return Sizes(world, x.size(0) / world);
    };
    const Sizes send = sizes(input_split_sizes, "input_split_sizes");
    const Sizes receive = sizes(output_split_sizes, "output_split_sizes");
    check_value(std::accumulate(send.begin(), send.end(), int64_t{0}) == x.size(0),
                "all_to_all: input_split_sizes do not add up to the ", x.size(0), " rows of x");
    const Tensor in = torch::stable::contiguous(x);
    Sizes shape = shape_of(in);
    const int64_t width =
        std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>()) * element_size(in);
    shape[0] = std::accumulate(receive.begin(), receive.end(), int64_t{0});
    Tensor out = empty_like_shape(in, shape);
    Call call = describe_copy(Op::kAllToAll, in, 0);
    call.shape[0] = kGatheredDim;
    note_path(Op::kAllToAll, Algorithm::kOneShot, "every rank copies what the others staged for it");
    all_to_all_rows(*group, call, bytes_of(in), mutable_bytes_of(out), send, receive, width);
    return out;
  });
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("all_reduce", TORCH_BOX(&interlace::all_reduce));
  m.impl("all_gather", TORCH_BOX(&interlace::all_gather));
  m.impl("reduce_scatter", TORCH_BOX(&interlace::reduce_scatter));
  m.impl("all_to_all", TORCH_BOX(&interlace::all_to_all));
}
