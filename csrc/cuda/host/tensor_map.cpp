#include "cuda/host/tensor_map.h"

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda/host/cuda_error.h"

namespace interlace {
namespace {

constexpr unsigned int kFirstVersion = 12000;  // the CUDA version that brought cuTensorMapEncodeTiled

CUtensorMapDataType data_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Dtype::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Dtype::kFloat8E4m3: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default: throw std::runtime_error(std::string("interlace: no tensor map for ") + dtype_name(dtype));
  }
}

CUtensorMap encode(EncodeTiled encode_tiled, const TensorMapRequest& request) {
  CUtensorMap map{};
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(request.inner), static_cast<cuuint64_t>(request.outer)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(request.outer_stride_bytes)};
  const cuuint32_t box[] = {request.box_inner, request.box_outer};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result =
      encode_tiled(&map, data_type(request.dtype), 2, const_cast<void*>(request.address), sizes, strides, box,
                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("interlace: cuTensorMapEncodeTiled failed with CUresult " +
                             std::to_string(result) + " for a " + dtype_name(request.dtype) + " matrix [" +
                             std::to_string(request.outer) + ", " + std::to_string(request.inner) +
                             "] with rows " + std::to_string(request.outer_stride_bytes) +
                             " bytes apart, box [" + std::to_string(request.box_outer) + ", " +
                             std::to_string(request.box_inner) + "]");
  }
  return map;
}

}  // namespace

EncodeTiled driver_encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion,
                                                cudaEnableDefault, &status),
               "cudaGetDriverEntryPointByVersion(cuTensorMapEncodeTiled)");
    if (status != cudaDriverEntryPointSuccess || function == nullptr) {
      throw std::runtime_error(
          "interlace: the CUDA driver has no cuTensorMapEncodeTiled; the sm_90 kernels need driver 525 or "
          "later");
    }
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return found;
}

size_t TensorMapCache::Hash::operator()(const TensorMapRequest& request) const {
  uint64_t hash = reinterpret_cast<uint64_t>(request.address);
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  };
  mix(static_cast<uint64_t>(request.dtype));
  mix(static_cast<uint64_t>(request.inner));
  mix(static_cast<uint64_t>(request.outer));
  mix(static_cast<uint64_t>(request.outer_stride_bytes));
  mix(static_cast<uint64_t>(request.box_inner) << 32 | request.box_outer);
  return static_cast<size_t>(hash);
}

bool TensorMapCache::Equal::operator()(const TensorMapRequest& a, const TensorMapRequest& b) const {
  return a.address == b.address && a.dtype == b.dtype && a.inner == b.inner && a.outer == b.outer &&
         a.outer_stride_bytes == b.outer_stride_bytes && a.box_inner == b.box_inner &&
         a.box_outer == b.box_outer;
}

CUtensorMap TensorMapCache::get(const TensorMapRequest& request) {
  const std::lock_guard lock(mutex_);
  if (const auto found = maps_.find(request); found != maps_.end()) return found->second;
  const CUtensorMap map = encode(encode_, request);
  if (maps_.size() >= kCapacity) maps_.clear();  // encoding again costs about a microsecond each
  maps_.emplace(request, map);
  return map;
}

size_t TensorMapCache::size() const {
  const std::lock_guard lock(mutex_);
  return maps_.size();
}

GemmTensorMaps encode_maps(const TensorMapRequest (&requests)[kTensorMaps]) {
  static TensorMapCache cache(driver_encode_tiled());
  GemmTensorMaps maps{};
  CUtensorMap* const order[] = {maps.x, maps.gathered, maps.weights};
  const int counts[] = {kMaxProducts, kGatheredMaps, kMaxProducts};
  int next = 0;
  for (int part = 0; part < 3; ++part) {
    for (int i = 0; i < counts[part]; ++i, ++next) {
      if (requests[next].address != nullptr) order[part][i] = cache.get(requests[next]);
    }
  }
  return maps;
}

}  // namespace interlace
