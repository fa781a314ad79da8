// One case of gemm_reduce_scatter or gemm_all_reduce on any mainloop: operands, launches of all ranks, what must come out.
#pragma once

#include "cuda/kernels/gemm_reduce.cuh"
#include "emu/fused_testing.h"

namespace interlace::emu::reduce_cases {

struct Call {
  std::vector<int64_t> rows;  // of every rank; all-reduce: how many there are does not matter, only their sum
  int64_t columns = 9;
  std::vector<int64_t> depths = {9};  // of every summed product
  bool scatter = true;
  bool bias = false;
  bool residual = false;
  bool norm = false;
  bool keep_sum = true;
  bool aligned = false;
};

struct Case {
  std::vector<Call> calls;
  uint32_t blocks = 3;
  int comm_blocks = 1;
  bool float32_wire = false;
  bool multicast = false;
  int32_t unit_rows = 2;
  uint32_t first_epoch = 0;
  Delay delay = {};

  int world_size() const { return static_cast<int>(calls[0].rows.size()); }
};

constexpr float kEpsilon = 0.25f;

// One rank's operands and results of one call.
template <class Mainloop> struct Operands {
  using Element = typename Mainloop::Element;
  using Out = typename Mainloop::Out;
  static constexpr bool kFloat8 = sizeof(Element) == 1;

  const Call& call;
  int rank, number;
  Shards shards;
  int64_t out_rows, first_row;  // of out among all rows
  std::vector<Matrix<Element>> xs, weights;
  Matrix<Out> bias, residual, norm_weight, out, normalised;
  std::vector<float> x_scale, weight_scale;

  Operands(const Call& of, int by, int nth) : call(of), rank(by), number(nth) {
    shards = shards_of(call.rows.data(), static_cast<int>(call.rows.size()));
    out_rows = call.scatter ? call.rows[rank] : shards.total();
    first_row = call.scatter ? shards.begin(rank) : 0;
    const int64_t gap = 1 + rank, shift = call.aligned ? 0 : rank;
    for (size_t p = 0; p < call.depths.size(); ++p) {
      const int64_t stride = operand_stride<Element>(call.depths[p], gap, call.aligned);
      xs.emplace_back(shards.total(), call.depths[p], stride, shift).fill(x_name(rank, p));
      weights.emplace_back(call.columns, call.depths[p], stride, shift).fill(x_name(rank, p) + 1);
    }
    bias = {1, call.columns, call.columns, shift};
    bias.fill(7);
    norm_weight = {1, call.columns, call.columns, shift};
    norm_weight.fill(9);
    residual = {out_rows, call.columns, call.columns + gap, shift};
    residual.fill(8, first_row);
    out = {out_rows, call.columns, call.columns + gap, shift};
    normalised = {out_rows, call.columns, call.columns + gap, shift};
    for (int64_t row = 0; row < shards.total(); ++row) x_scale.push_back(scale(row));
    for (int64_t column = 0; column < call.columns; ++column) weight_scale.push_back(scale(column + 1));
  }
  int x_name(int of_rank, size_t p) const {
    return 1000 * (of_rank + 1) + 10 * number + 2 * static_cast<int>(p) + 20;
  }
  static float scale(int64_t place) { return place % 2 == 0 ? 1.0f : 2.0f; }

  GemmArguments arguments() {
    GemmArguments arguments{};
    arguments.rows = shards.total();
    arguments.count = static_cast<int32_t>(xs.size());
    arguments.summed = true;
    arguments.row_wise = kFloat8;
    if (kFloat8) arguments.x_scale = x_scale.data();
    for (size_t p = 0; p < xs.size(); ++p) {
      arguments.x[p] = xs[p].data();
      arguments.x_stride[p] = xs[p].stride();
      arguments.products[p] = {weights[p].data(), call.columns,
                               call.depths[p],    weights[p].stride(),
                               nullptr,           kFloat8 ? weight_scale.data() : nullptr,
                               nullptr,           0};
    }
    if (call.bias) arguments.products[0].bias = bias.data();
    if (call.keep_sum) arguments.products[0].out = out.data();
    arguments.products[0].out_stride = out.stride();
    if (call.residual) arguments.residual = residual.data();
    arguments.residual_stride = residual.stride();
    return arguments;
  }

  float expected(int64_t row, int64_t column) const {
    float sum = 0;
    for (int peer = 0; peer < shards.world_size; ++peer) {
      for (size_t p = 0; p < xs.size(); ++p) {
        for (int64_t k = 0; k < call.depths[p]; ++k)
          sum += small_integer(x_name(peer, p), row, k) * small_integer(x_name(peer, p) + 1, column, k);
      }
    }
    if (kFloat8) sum *= scale(row) * scale(column + 1);
    if (call.bias) sum += small_integer(7, 0, column);
    if (call.residual) sum += small_integer(8, row, column);
    return sum;
  }

  void check() {
    for (int64_t row = 0; row < out_rows; ++row) {
      std::vector<float> want;
      double squares = 0;
      for (int64_t column = 0; column < call.columns; ++column) {
        want.push_back(expected(first_row + row, column));
        squares += want[column] * want[column];
        if (call.keep_sum)
          require_equal(to_float(out.at(row, column)), want[column], place("out", rank, number, row, column));
      }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(call.columns) + kEpsilon);
      for (int64_t column = 0; call.norm && column < call.columns; ++column) {
        const double exact = want[column] * scale * small_integer(9, 0, column);
        const double got = to_float(normalised.at(row, column));
        // one rounding to 8 bits, and a few of fp32 before it
        require(std::abs(got - exact) <= std::abs(exact) * 0x1.1p-8,
                place("normalised", rank, number, row, column) + ": " + std::to_string(got) + " instead of " +
                    std::to_string(exact));
      }
    }
    out.require_gaps("out");
    normalised.require_gaps("normalised");
  }
};

template <class Mainloop>
void launch(const SymmetricGroup& group, const GemmArguments& arguments, const ReduceArguments& reduce) {
  const typename Mainloop::Maps maps = Mainloop::maps(arguments, {});
  gemm_reduce_kernel<Mainloop>(group, arguments, prepared(reduce), maps);
}

template <class Mainloop> ReduceArguments reduce_arguments(const Case& test, Operands<Mainloop>& operands) {
  const Call& call = operands.call;
  ReduceArguments reduce{};
  reduce.schedule = call.scatter
                        ? reduce_scatter_schedule(operands.arguments(), operands.shards, operands.rank,
                                                  Mainloop::kTileColumns, Mainloop::kTileRows)
                        : all_reduce_schedule(operands.arguments(), test.world_size(), operands.rank,
                                              Mainloop::kTileColumns, Mainloop::kTileRows);
  reduce.schedule.unit_rows = test.unit_rows;
  if (call.norm) {
    reduce.normalised = operands.normalised.data();
    reduce.norm_weight = operands.norm_weight.data();
  }
  reduce.normalised_stride = operands.normalised.stride();
  reduce.eps = kEpsilon;
  reduce.comm_blocks = test.comm_blocks;
  reduce.float32_wire = test.float32_wire;
  reduce.multicast = test.multicast;
  return reduce;
}

template <class Mainloop> int64_t largest_half(const Case& test) {
  int64_t largest = 0;
  for (const Call& call : test.calls) {
    Operands<Mainloop> operands(call, 0, 0);
    const ReduceSchedule schedule = reduce_arguments(test, operands).schedule;
    largest = std::max(
        largest, schedule.half_bytes(test.multicast, call.columns, test.float32_wire ? sizeof(float) : 2, 2));
  }
  return largest;
}

template <class Mainloop> void run(const Case& test, uint64_t seed) {
  World world(seed, test.delay);
  EmulatedGroup group(test.world_size(), largest_half<Mainloop>(test), test.first_epoch);
  if (test.multicast) group.bind_multicast(world);
  run_ranks(world, test.world_size(), {test.blocks, Mainloop::kThreads, Mainloop::kSharedBytes},
            [&](Device& device, int rank) {
              for (int number = 0; number < static_cast<int>(test.calls.size()); ++number) {
                Operands<Mainloop> operands(test.calls[number], rank, number);
                const GemmArguments arguments = operands.arguments();
                const ReduceArguments reduce = reduce_arguments(test, operands);
                if (!device.launch([&] { launch<Mainloop>(group.as_seen_by(rank), arguments, reduce); }))
                  return;
                operands.check();
              }
            });
  require_finished(world);
}

}  // namespace interlace::emu::reduce_cases
