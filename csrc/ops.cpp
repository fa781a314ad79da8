// Schemas of all ops. Kernels: csrc/cpu/*_ops.cpp, csrc/cuda/host; fakes: python/interlace/ops.py; gradients:
// python/interlace/functional. `<op>_reference` is the same op in plain torch.distributed (python/interlace/reference.py),
// `<op>_decomposed` the product in pieces under its collective (python/interlace/decomposed).
#include <torch/csrc/stable/library.h>

#include <string>

namespace {

const struct {
  const char* name;
  const char* signature;
} kOps[] = {
    {"all_gather_gemm",
     "(Tensor x_shard, Tensor[] weights, Tensor?[] biases, int gather_dim, str group_name, bool "
     "return_gathered, "
     "SymInt? gather_size=None, SymInt[] packed_rows=[]) -> (Tensor, Tensor[])"},
    {"gemm_reduce_scatter",
     "(Tensor x, Tensor weight, Tensor? bias, int scatter_dim, str group_name, SymInt? packed_rows=None, "
     "SymInt? length=None) -> Tensor"},
    {"gemm_all_reduce",
     "(Tensor x, Tensor weight, Tensor? bias, str group_name, SymInt? packed_rows=None) -> Tensor"},
    {"sum_gemm_reduce_scatter",
     "(Tensor[] xs, Tensor[] weights, int scatter_dim, str group_name, SymInt? length=None) -> Tensor"},
    {"sum_gemm_all_reduce", "(Tensor[] xs, Tensor[] weights, str group_name) -> Tensor"},
    {"column_gemm",
     "(Tensor x, Tensor[] weights, Tensor?[] biases, str group_name, SymInt[] packed_rows=[]) -> Tensor[]"},
    {"gemm_all_reduce_norm",
     "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor norm_weight, float eps, str "
     "group_name) "
     "-> (Tensor, Tensor)"},
    {"gemm_reduce_scatter_norm",
     "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor norm_weight, float eps, int "
     "scatter_dim, "
     "str group_name, SymInt? length=None) -> (Tensor, Tensor)"},
    {"all_gather_gemm_scaled",
     "(Tensor x_shard, Tensor x_scale, Tensor[] weights, Tensor[] weight_scales, Tensor?[] biases, "
     "ScalarType out_dtype, int gather_dim, str group_name, SymInt? gather_size=None) -> Tensor[]"},
    {"gemm_reduce_scatter_scaled",
     "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
     "int scatter_dim, str group_name, SymInt? length=None) -> Tensor"},
    {"all_reduce", "(Tensor x, str group_name) -> Tensor"},
    {"all_gather", "(Tensor x, int dim, str group_name, SymInt? gather_size=None) -> Tensor"},
    {"reduce_scatter", "(Tensor x, int dim, str group_name, SymInt? length=None) -> Tensor"},
    {"all_to_all",
     "(Tensor x, SymInt[]? output_split_sizes, SymInt[]? input_split_sizes, str group_name) -> Tensor"},
};

// Products whose collective can run under them piece by piece.
bool communicates_products(const std::string& name) {
  return name.find("gemm") != std::string::npos && name != "column_gemm";
}

}  // namespace

STABLE_TORCH_LIBRARY(interlace, m) {
  for (const auto& op : kOps) {
    m.def((std::string(op.name) + op.signature).c_str());
    m.def((std::string(op.name) + "_reference" + op.signature).c_str());
    if (communicates_products(op.name)) {
      m.def((std::string(op.name) + "_decomposed" + op.signature).c_str());
    }
  }
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("unpack_weight(Tensor packed, int rows, int depth) -> Tensor");
  m.def("engine_info() -> (str, bool, bool, int)");
  m.def("cap_isa(str name) -> ()");
  m.def("choose(str op, str dtype, int rows) -> (str, str)");
}
