// Private ops of the plain collectives: everybody waits for its namesake blocks, messages are small.
#include "cuda/host/budget.h"
#include "cuda/host/cuda_error.h"
#include "cuda/host/tensors.h"
#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/launch.h"

namespace interlace {
namespace {

Dtype summed_dtype(const char* op, const Tensor& x) {
  const Dtype dtype = dtype_of(op, "the input", x);
  check_type(dtype != Dtype::kFloat8E4m3, op,
             ": the input is float8_e4m3fn; expected bfloat16, float16 or float32");
  return dtype;
}

void check_dense(const char* op, const char* what, const Tensor& tensor) {
  check_value(tensor.is_contiguous(), op, ": ", what, " ", shape_text(tensor),
              " has gaps; call contiguous()");
}

void check_blocks(const char* op, int64_t blocks) {
  check_value(blocks >= 1 && blocks <= kMaxBlocks, op, ": got blocks=", blocks, "; expected 1 to ",
              kMaxBlocks);
}

void check_multicast(const char* op, bool use_multicast, const GroupTail& tail) {
  check_value(!use_multicast || tail.multicast != 0, op,
              ": use_multicast without a multicast address; this workspace has none");
}

// Where the launch goes; after all other checks, because the device is asked.
struct Launch {
  int32_t device;
  int blocks;
  cudaStream_t stream;
};
Launch launch_on(const char* op, const Tensors& tensors, const GroupTail& tail, int64_t blocks) {
  const int32_t device = common_device(op, tensors);
  const DeviceShare share{multiprocessors(device), tail.ranks_on_device()};
  return {device, choose_budget(op, share, blocks, 0, blocks).blocks, current_stream(device)};
}

using AllReduceLaunch = cudaError_t (*)(const SymmetricGroup&, int, const AllReduceArguments&, Dtype, int,
                                        cudaStream_t);

// inputs and outs: one tensor for each rank that this launch plays, from `rank` on.
void all_reduce(const char* op, AllReduceLaunch launch, const Tensors& inputs, const Tensors& outs,
                const GroupTail& tail, int64_t half_bytes, int64_t blocks) {
  const SymmetricGroup group = group_of(op, tail);
  const auto played = static_cast<int64_t>(inputs.size());
  check_value(
      played == 1 || (played == tail.world_size() && tail.rank == 0 && tail.ranks_on_device() == played), op,
      ": got ", played, " inputs; expected 1, or one for each of ", tail.world_size(), " virtual ranks");
  check_value(outs.size() == inputs.size(), op, ": got ", outs.size(), " outs for ", played, " inputs");
  check_blocks(op, blocks);
  const Dtype dtype = summed_dtype(op, inputs[0]);
  AllReduceArguments arguments{};
  arguments.count = inputs[0].numel();
  Tensors tensors;
  for (int64_t i = 0; i < played; ++i) {
    for (const Tensor* tensor : {&inputs[i], &outs[i]}) {
      check_dtype(op, tensor == &outs[i] ? "out" : "input", *tensor, dtype);
      check_dense(op, tensor == &outs[i] ? "out" : "input", *tensor);
      check_value(tensor->numel() == arguments.count, op, ": got tensors of ", arguments.count, " and of ",
                  tensor->numel(), " elements; expected equal lengths");
      tensors.push_back(*tensor);
    }
    arguments.inputs[i] = inputs[i].const_data_ptr();
    arguments.outs[i] = outs[i].mutable_data_ptr();
  }
  check_half(op, tail, half_bytes);
  const Launch place = launch_on(op, tensors, tail, blocks);
  if (arguments.count == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  check_cuda(launch(group, static_cast<int>(played), arguments, dtype, place.blocks, place.stream), op);
}

int64_t bytes_per_element(const Tensors& inputs) {
  return inputs.empty() ? 1 : static_cast<int64_t>(inputs[0].element_size());
}

void device_one_shot_all_reduce(Tensors inputs, Tensors outs, INTERLACE_TAIL_PARAMETERS, int64_t blocks) {
  constexpr const char* kOp = "one_shot_all_reduce";
  check_value(!inputs.empty(), kOp, ": got no input");
  const int64_t half = one_shot_half_bytes(1, inputs[0].numel(), bytes_per_element(inputs));
  all_reduce(kOp, &launch_one_shot_all_reduce, inputs, outs, INTERLACE_TAIL_ARGUMENTS, half, blocks);
}

void device_two_shot_all_reduce(Tensors inputs, Tensors outs, INTERLACE_TAIL_PARAMETERS, int64_t blocks,
                                bool use_multicast) {
  constexpr const char* kOp = "two_shot_all_reduce";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  check_value(!inputs.empty(), kOp, ": got no input");
  check_multicast(kOp, use_multicast, tail);
  const auto world_size = static_cast<int>(tail.world_size());
  check_value(world_size >= 1, kOp, ": got no segments; expected one per rank");
  const int64_t half = two_shot_half_bytes(1, inputs[0].numel(), bytes_per_element(inputs), world_size);
  all_reduce(kOp, use_multicast ? &launch_two_shot_all_reduce_multimem : &launch_two_shot_all_reduce, inputs,
             outs, tail, half, blocks);
}

// Input and what is added behind the sum, checked; the rows of sums, residual and out are `own_rows`.
struct NormOperands {
  const Tensor& input;
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  const OptionalTensor& norm_weight;
  double eps;
  const OptionalTensor& sums;
  const OptionalTensor& out;
};

using RowLaunch = cudaError_t (*)(const SymmetricGroup&, int, const RowArguments&, Dtype, int, cudaStream_t);

struct RowCall {
  const char* op;
  RowLaunch launch;
  const Sizes* rows;  // of every rank; null: all ranks have all rows
  int64_t blocks;
};

void* optional_rows(const char* op, const char* what, const OptionalTensor& tensor, Dtype dtype, int64_t rows,
                    int64_t columns, Tensors& all) {
  if (!tensor.has_value()) return nullptr;
  check_dtype(op, what, *tensor, dtype);
  check_dense(op, what, *tensor);
  matrix_of(op, what, *tensor, rows, columns);
  all.push_back(*tensor);
  return tensor->data_ptr();
}

void* optional_columns(const char* op, const char* what, const OptionalTensor& tensor, Dtype dtype,
                       int64_t columns, Tensors& all) {
  if (!tensor.has_value()) return nullptr;
  check_dtype(op, what, *tensor, dtype);
  all.push_back(*tensor);
  return vector_of(op, what, *tensor, columns);
}

void reduce_rows(const RowCall& call, const NormOperands& operands, const GroupTail& tail,
                 int64_t half_bytes) {
  const char* const op = call.op;
  const SymmetricGroup group = group_of(op, tail);
  check_blocks(op, call.blocks);
  const Dtype dtype = summed_dtype(op, operands.input);
  check_dense(op, "input", operands.input);
  const Matrix input = matrix_of(op, "input", operands.input);
  const int64_t own_rows = call.rows == nullptr ? input.rows : (*call.rows)[tail.rank];
  check_value(operands.sums.has_value() || operands.out.has_value(), op,
              ": got neither sums nor out; expected one of them");
  check_value(operands.eps >= 0, op, ": eps is ", operands.eps, "; expected 0 or more");
  RowArguments arguments{};
  Tensors tensors{operands.input};
  arguments.inputs[0] = input.data;
  arguments.residuals[0] =
      optional_rows(op, "residual", operands.residual, dtype, own_rows, input.columns, tensors);
  arguments.sums[0] = optional_rows(op, "sums", operands.sums, dtype, own_rows, input.columns, tensors);
  arguments.outs[0] = optional_rows(op, "out", operands.out, dtype, own_rows, input.columns, tensors);
  arguments.bias = optional_columns(op, "bias", operands.bias, dtype, input.columns, tensors);
  arguments.norm_weight =
      optional_columns(op, "norm_weight", operands.norm_weight, dtype, input.columns, tensors);
  arguments.eps = static_cast<float>(operands.eps);
  arguments.columns = input.columns;
  arguments.rows = call.rows == nullptr ? shards_of(&input.rows, 1)
                                        : shards_of(call.rows->data(), static_cast<int>(call.rows->size()));
  check_value(arguments.rows.total() == input.rows, op, ": the input has ", input.rows, " rows; expected ",
              arguments.rows.total(), ", the sum of rows");
  check_half(op, tail, half_bytes);
  const Launch place = launch_on(op, tensors, tail, call.blocks);
  if (input.rows == 0 || input.columns == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  check_cuda(call.launch(group, 1, arguments, dtype, place.blocks, place.stream), op);
}

int64_t rows_of(const Tensor& x) { return x.dim() == 2 ? x.size(0) : 0; }
int64_t columns_of(const Tensor& x) { return x.dim() == 2 ? x.size(1) : 0; }
int64_t element_bytes_of(const Tensor& x) { return static_cast<int64_t>(x.element_size()); }

void device_one_shot_all_reduce_norm(Tensor input, OptionalTensor bias, OptionalTensor residual,
                                     OptionalTensor norm_weight, double eps, OptionalTensor sums,
                                     OptionalTensor out, INTERLACE_TAIL_PARAMETERS, int64_t blocks) {
  reduce_rows({"one_shot_all_reduce_norm", &launch_one_shot_all_reduce_norm, nullptr, blocks},
              {input, bias, residual, norm_weight, eps, sums, out}, INTERLACE_TAIL_ARGUMENTS,
              one_shot_half_bytes(rows_of(input), columns_of(input), element_bytes_of(input)));
}

void device_two_shot_all_reduce_norm(Tensor input, OptionalTensor bias, OptionalTensor residual,
                                     OptionalTensor norm_weight, double eps, OptionalTensor sums,
                                     OptionalTensor out, INTERLACE_TAIL_PARAMETERS, int64_t blocks,
                                     bool use_multicast) {
  constexpr const char* kOp = "two_shot_all_reduce_norm";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  check_multicast(kOp, use_multicast, tail);
  check_value(tail.world_size() >= 1, kOp, ": got no segments; expected one per rank");
  const int64_t half = two_shot_half_bytes(rows_of(input), columns_of(input), element_bytes_of(input),
                                           static_cast<int>(tail.world_size()));
  reduce_rows(
      {kOp, use_multicast ? &launch_two_shot_all_reduce_norm_multimem : &launch_two_shot_all_reduce_norm,
       nullptr, blocks},
      {input, bias, residual, norm_weight, eps, sums, out}, tail, half);
}

void device_reduce_scatter_norm(Tensor input, OptionalTensor bias, OptionalTensor residual,
                                OptionalTensor norm_weight, double eps, OptionalTensor sums,
                                OptionalTensor out, Sizes rows, INTERLACE_TAIL_PARAMETERS, int64_t blocks,
                                bool use_multicast) {
  constexpr const char* kOp = "reduce_scatter_norm";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  check_multicast(kOp, use_multicast, tail);
  group_of(kOp, tail);
  check_rows(kOp, rows, tail.world_size());
  const Shards shards = shards_of(rows.data(), static_cast<int>(rows.size()));
  const int64_t half =
      slots_half_bytes(largest_of(shards), columns_of(input), element_bytes_of(input), shards.world_size);
  reduce_rows({kOp, use_multicast ? &launch_reduce_scatter_norm_multimem : &launch_reduce_scatter_norm, &rows,
               blocks},
              {input, bias, residual, norm_weight, eps, sums, out}, tail, half);
}

Shards elements_of(const Sizes& rows, int64_t row_elements) {
  Sizes elements;
  for (const int64_t count : rows) elements.push_back(count * row_elements);
  return shards_of(elements.data(), static_cast<int>(elements.size()));
}

// rows: of dim 0 of the whole tensor, by rank. Returns the elements of every rank.
ShardArguments shard_arguments(const char* op, const Tensor& whole, const Tensor& shard, const Sizes& rows,
                               const GroupTail& tail) {
  check_rows(op, rows, tail.world_size());
  check_dense(op, "x", whole);
  check_dense(op, "out", shard);
  check_type(whole.scalar_type() == shard.scalar_type(), op, ": x and out have different dtypes");
  check_value(whole.dim() >= 1 && shard.dim() == whole.dim(), op, ": got ", shape_text(whole), " and ",
              shape_text(shard), "; expected as many dims, at least 1");
  int64_t total = 0, row_elements = 1;
  for (const int64_t count : rows) total += count;
  for (int64_t d = 1; d < whole.dim(); ++d) {
    check_value(whole.size(d) == shard.size(d), op, ": got ", shape_text(whole), " and ", shape_text(shard),
                "; expected equal shapes behind dim 0");
    row_elements *= whole.size(d);
  }
  check_value(whole.size(0) == total && shard.size(0) == rows[tail.rank], op, ": got ", whole.size(0),
              " and ", shard.size(0), " rows; expected ", total, " in all and ", rows[tail.rank],
              " here, from rows ", list_text(rows));
  ShardArguments arguments{};
  arguments.elements = elements_of(rows, row_elements);
  return arguments;
}

void device_reduce_scatter(Tensor x, Tensor out, Sizes rows, INTERLACE_TAIL_PARAMETERS, int64_t blocks,
                           bool use_multicast) {
  constexpr const char* kOp = "reduce_scatter";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_multicast(kOp, use_multicast, tail);
  check_blocks(kOp, blocks);
  const Dtype dtype = summed_dtype(kOp, x);
  ShardArguments arguments = shard_arguments(kOp, x, out, rows, tail);
  check_half(kOp, tail,
             slots_half_bytes(1, largest_of(arguments.elements), element_bytes_of(x), group.world_size));
  arguments.inputs[0] = x.const_data_ptr();
  arguments.outs[0] = out.mutable_data_ptr();
  const Launch place = launch_on(kOp, {x, out}, tail, blocks);
  if (arguments.elements.total() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  const auto launch = use_multicast ? &launch_reduce_scatter_multimem : &launch_reduce_scatter;
  check_cuda(launch(group, 1, arguments, dtype, place.blocks, place.stream), "launch of reduce_scatter");
}

void device_all_gather(Tensor x, Tensor out, Sizes rows, INTERLACE_TAIL_PARAMETERS, int64_t blocks,
                       bool use_multicast) {
  constexpr const char* kOp = "all_gather";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_multicast(kOp, use_multicast, tail);
  check_blocks(kOp, blocks);
  const int64_t size = element_bytes_of(x);
  check_type(size <= 8, kOp, ": elements of ", size, " bytes; expected 1, 2, 4 or 8, view them as such");
  ShardArguments arguments = shard_arguments(kOp, out, x, rows, tail);
  check_half(kOp, tail, slots_half_bytes(1, largest_of(arguments.elements), size, group.world_size));
  arguments.inputs[0] = x.const_data_ptr();
  arguments.outs[0] = out.mutable_data_ptr();
  const Launch place = launch_on(kOp, {x, out}, tail, blocks);
  if (arguments.elements.total() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  const auto launch = use_multicast ? &launch_all_gather_multimem : &launch_all_gather;
  check_cuda(launch(group, 1, arguments, size, place.blocks, place.stream), "launch of all_gather");
}

// sent, received: rows of dim 0 for and from every rank. largest_rows: at least the largest piece of all ranks.
void device_all_to_all(Tensor x, Tensor out, Sizes sent, Sizes received, int64_t largest_rows,
                       INTERLACE_TAIL_PARAMETERS, int64_t blocks) {
  constexpr const char* kOp = "all_to_all";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_blocks(kOp, blocks);
  check_rows(kOp, sent, tail.world_size());
  check_rows(kOp, received, tail.world_size());
  check_dense(kOp, "x", x);
  check_dense(kOp, "out", out);
  check_type(x.scalar_type() == out.scalar_type() && x.element_size() <= 8, kOp,
             ": x and out must have one dtype of 1, 2, 4 or 8 bytes");
  const int64_t size = element_bytes_of(x);
  const Matrix in = matrix_of(kOp, "x", x), to = matrix_of(kOp, "out", out);
  AllToAllArguments arguments{};
  arguments.sent[0] = elements_of(sent, in.columns);
  arguments.received[0] = elements_of(received, in.columns);
  arguments.largest = largest_rows * in.columns;
  check_value(in.columns == to.columns && arguments.sent[0].total() == in.rows * in.columns &&
                  arguments.received[0].total() == to.rows * to.columns,
              kOp, ": got x ", shape_text(x), " and out ", shape_text(out),
              "; expected as many columns, and rows ", list_text(sent), " sent, ", list_text(received),
              " received");
  check_value(largest_of(arguments.sent[0]) <= arguments.largest &&
                  largest_of(arguments.received[0]) <= arguments.largest,
              kOp, ": largest_rows=", largest_rows, " is less than a piece of ", list_text(sent), " or ",
              list_text(received));
  check_half(kOp, tail, slots_half_bytes(1, arguments.largest, size, group.world_size));
  arguments.inputs[0] = in.data;
  arguments.outs[0] = to.data;
  const Launch place = launch_on(kOp, {x, out}, tail, blocks);
  if (arguments.largest == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  check_cuda(launch_all_to_all(group, 1, arguments, size, place.blocks, place.stream),
             "launch of all_to_all");
}

int64_t half_bytes_one_shot(int64_t rows, int64_t columns, int64_t element_bytes) {
  return one_shot_half_bytes(rows, columns, element_bytes);
}
int64_t half_bytes_two_shot(int64_t rows, int64_t columns, int64_t element_bytes, int64_t world_size) {
  return two_shot_half_bytes(rows, columns, element_bytes, static_cast<int>(world_size));
}
int64_t half_bytes_slots(int64_t largest_rows, int64_t columns, int64_t element_bytes, int64_t world_size) {
  return slots_half_bytes(largest_rows, columns, element_bytes, static_cast<int>(world_size));
}

}  // namespace
}  // namespace interlace

#define INTERLACE_NORM_SCHEMA                                                                         \
  "(Tensor input, Tensor? bias, Tensor? residual, Tensor? norm_weight, float eps, Tensor(a!)? sums, " \
  "Tensor(b!)? "                                                                                      \
  "out, "
#define INTERLACE_COLLECTIVE_SCHEMA_END INTERLACE_TAIL_SCHEMA ", int blocks, bool use_multicast=False) -> ()"

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("_device_one_shot_all_reduce(Tensor[] inputs, Tensor(a!)[] outs, " INTERLACE_TAIL_SCHEMA
        ", int blocks) -> ()");
  m.def("_device_two_shot_all_reduce(Tensor[] inputs, Tensor(a!)[] outs, " INTERLACE_COLLECTIVE_SCHEMA_END);
  m.def("_device_one_shot_all_reduce_norm" INTERLACE_NORM_SCHEMA INTERLACE_TAIL_SCHEMA ", int blocks) -> ()");
  m.def("_device_two_shot_all_reduce_norm" INTERLACE_NORM_SCHEMA INTERLACE_COLLECTIVE_SCHEMA_END);
  m.def("_device_reduce_scatter_norm" INTERLACE_NORM_SCHEMA "int[] rows, " INTERLACE_COLLECTIVE_SCHEMA_END);
  m.def("_device_reduce_scatter(Tensor x, Tensor(a!) out, int[] rows, " INTERLACE_COLLECTIVE_SCHEMA_END);
  m.def("_device_all_gather(Tensor x, Tensor(a!) out, int[] rows, " INTERLACE_COLLECTIVE_SCHEMA_END);
  m.def(
      "_device_all_to_all(Tensor x, Tensor(a!) out, int[] sent, int[] received, int "
      "largest_rows, " INTERLACE_TAIL_SCHEMA ", int blocks) -> ()");
  m.def("_device_half_bytes_one_shot(int rows, int columns, int element_bytes) -> int");
  m.def("_device_half_bytes_two_shot(int rows, int columns, int element_bytes, int world_size) -> int");
  m.def("_device_half_bytes_slots(int largest_rows, int columns, int element_bytes, int world_size) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_one_shot_all_reduce", TORCH_BOX(&interlace::device_one_shot_all_reduce));
  m.impl("_device_two_shot_all_reduce", TORCH_BOX(&interlace::device_two_shot_all_reduce));
  m.impl("_device_one_shot_all_reduce_norm", TORCH_BOX(&interlace::device_one_shot_all_reduce_norm));
  m.impl("_device_two_shot_all_reduce_norm", TORCH_BOX(&interlace::device_two_shot_all_reduce_norm));
  m.impl("_device_reduce_scatter_norm", TORCH_BOX(&interlace::device_reduce_scatter_norm));
  m.impl("_device_reduce_scatter", TORCH_BOX(&interlace::device_reduce_scatter));
  m.impl("_device_all_gather", TORCH_BOX(&interlace::device_all_gather));
  m.impl("_device_all_to_all", TORCH_BOX(&interlace::device_all_to_all));
  m.impl("_device_half_bytes_one_shot", TORCH_BOX(&interlace::half_bytes_one_shot));
  m.impl("_device_half_bytes_two_shot", TORCH_BOX(&interlace::half_bytes_two_shot));
  m.impl("_device_half_bytes_slots", TORCH_BOX(&interlace::half_bytes_slots));
}
