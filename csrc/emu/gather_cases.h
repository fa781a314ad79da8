// One case of all_gather_gemm on any mainloop: operands, launches of all ranks, what must come out.
#pragma once

#include "cuda/kernels/all_gather_gemm.cuh"
#include "emu/fused_testing.h"

namespace interlace::emu::gather_cases {

struct Call {
  std::vector<int64_t> rows;  // of every rank
  std::vector<int64_t> columns;  // of every weight
  int64_t depth = 9;
  bool bias = false;
  bool gathered = false;
  bool aligned = false;
  bool row_wise = true;  // fp8: a scale per row and column, or one per rank and weight
};

struct Case {
  std::vector<Call> calls;
  uint32_t blocks = 3;
  int comm_blocks = 1;
  int32_t chunk_row_blocks = 1;
  uint32_t first_epoch = 0;
  Delay delay = {};

  int world_size() const { return static_cast<int>(calls[0].rows.size()); }
};

constexpr int kScales = 50;  // matrices above have a scale per row or column

// One rank's operands and results of one call.
template <class Mainloop> struct Operands {
  using Element = typename Mainloop::Element;
  using Out = typename Mainloop::Out;
  static constexpr bool kFloat8 = sizeof(Element) == 1;

  const Call& call;
  int rank, number;
  Shards shards;
  Matrix<Element> x, gathered;
  std::vector<Matrix<Element>> weights;
  std::vector<Matrix<Out>> biases, outs;
  std::vector<float> x_scale;
  std::vector<std::vector<float>> weight_scale;

  static float scale(int matrix, int64_t place) { return (matrix + place) % 2 == 0 ? 1.0f : 2.0f; }
  float scale_of_row(int64_t row) const {
    int owner = 0;
    while (row >= shards.begin(owner) + shards.rows(owner)) ++owner;
    return scale(kScales + number, call.row_wise ? row : owner);
  }
  float scale_of_column(size_t p, int64_t column) const {
    return scale(weight_name(p), call.row_wise ? column : 0);
  }

  Operands(const Call& of, int by, int nth) : call(of), rank(by), number(nth) {
    shards = shards_of(call.rows.data(), static_cast<int>(call.rows.size()));
    const int64_t gap = 1 + rank, shift = call.aligned ? 0 : rank;
    const int64_t stride = operand_stride<Element>(call.depth, gap, call.aligned);
    x = {call.rows[rank], call.depth, stride, shift};
    x.fill(number, shards.begin(rank));
    gathered = {shards.total(), call.depth, call.depth + gap, shift};
    for (int64_t row = 0; row < call.rows[rank]; ++row)
      x_scale.push_back(scale_of_row(shards.begin(rank) + row));
    for (size_t p = 0; p < call.columns.size(); ++p) {
      const int64_t columns = call.columns[p];
      weights.emplace_back(columns, call.depth, stride, shift).fill(weight_name(p));
      biases.emplace_back(1, columns, columns, shift).fill(weight_name(p) + 1);
      outs.emplace_back(shards.total(), columns, columns + gap, shift);
      std::vector<float>& scales = weight_scale.emplace_back();
      for (int64_t column = 0; column < columns; ++column) scales.push_back(scale_of_column(p, column));
    }
  }
  int weight_name(size_t p) const { return 1000 * (rank + 1) + 10 * number + 2 * static_cast<int>(p); }

  GemmArguments arguments() {
    GemmArguments arguments{};
    arguments.x[0] = x.data();
    arguments.x_stride[0] = x.stride();
    arguments.rows = call.rows[rank];
    arguments.count = static_cast<int32_t>(call.columns.size());
    if (kFloat8) arguments.x_scale = x_scale.data();
    arguments.row_wise = kFloat8 && call.row_wise;
    for (size_t p = 0; p < call.columns.size(); ++p) {
      arguments.products[p] = {weights[p].data(),
                               call.columns[p],
                               call.depth,
                               weights[p].stride(),
                               call.bias ? biases[p].data() : nullptr,
                               kFloat8 ? weight_scale[p].data() : nullptr,
                               outs[p].data(),
                               outs[p].stride()};
    }
    return arguments;
  }

  void check() {
    for (size_t p = 0; p < outs.size(); ++p) {
      for (int64_t row = 0; row < shards.total(); ++row) {
        for (int64_t column = 0; column < call.columns[p]; ++column) {
          float want = 0;
          for (int64_t k = 0; k < call.depth; ++k)
            want += small_integer(number, row, k) * small_integer(weight_name(p), column, k);
          if (kFloat8) want *= scale_of_row(row) * scale_of_column(p, column);
          if (call.bias) want += small_integer(weight_name(p) + 1, 0, column);
          require_equal(to_float(outs[p].at(row, column)), want, place("out", rank, number, row, column));
        }
      }
      outs[p].require_gaps("out");
    }
    for (int64_t row = 0; call.gathered && row < shards.total(); ++row) {
      for (int64_t k = 0; k < call.depth; ++k)
        require_equal(value_of(gathered.at(row, k)), small_integer(number, row, k),
                      place("gathered", rank, number, row, k));
    }
    gathered.require_gaps("gathered");
  }
};

template <class Mainloop>
void launch(const SymmetricGroup& group, const GemmArguments& arguments, const GatherArguments& gather) {
  const GatheredRows gathered =
      gathered_rows(group, gather.schedule.rank, gather.schedule, arguments.products[0].depth,
                    dtype_of<typename Mainloop::Element>);
  const typename Mainloop::Maps maps = Mainloop::maps(arguments, gathered);
  all_gather_gemm_kernel<Mainloop>(group, arguments, prepared(gather), maps);
}

template <class Mainloop> GatherArguments gather_arguments(const Case& test, Operands<Mainloop>& operands) {
  GatherArguments gather{};
  gather.schedule = gather_schedule(operands.arguments(), operands.shards, operands.rank,
                                    Mainloop::kTileColumns, Mainloop::kTileRows);
  gather.schedule.chunk_row_blocks = test.chunk_row_blocks;
  if (operands.call.gathered) gather.gathered = operands.gathered.data();
  gather.gathered_stride = operands.gathered.stride();
  gather.comm_blocks = test.comm_blocks;
  return gather;
}

template <class Mainloop> int64_t largest_half(const Case& test) {
  int64_t largest = 0;
  for (const Call& call : test.calls) {
    Operands<Mainloop> operands(call, 0, 0);
    const int64_t bytes =
        gather_arguments(test, operands).schedule.half_bytes(call.depth, sizeof(typename Mainloop::Element));
    largest = std::max(largest, bytes);
  }
  return largest;
}

template <class Mainloop> void run(const Case& test, uint64_t seed) {
  World world(seed, test.delay);
  EmulatedGroup group(test.world_size(), largest_half<Mainloop>(test), test.first_epoch);
  run_ranks(world, test.world_size(), {test.blocks, Mainloop::kThreads, Mainloop::kSharedBytes},
            [&](Device& device, int rank) {
              for (int number = 0; number < static_cast<int>(test.calls.size()); ++number) {
                Operands<Mainloop> operands(test.calls[number], rank, number);
                const GemmArguments arguments = operands.arguments();
                const GatherArguments gather = gather_arguments(test, operands);
                if (!device.launch([&] { launch<Mainloop>(group.as_seen_by(rank), arguments, gather); }))
                  return;
                operands.check();
              }
            });
  require_finished(world);
}

}  // namespace interlace::emu::gather_cases
