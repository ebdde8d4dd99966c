// Tensor maps: what the copy engine knows of a tensor in device memory. Host side.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "../params.h"

// A (batch, seqlen, heads, head_dim) tensor.
struct TensorMap {
  CUtensorMap map;  // coordinates: column, row, head * head_step, batch * batch_step
  // 0 where all heads, or all sequences, are the same rows: a stride of 0, of an expanded tensor or a dimension of
  // one. The map has one index there, since nobody says that its strides may be 0.
  int32_t head_step, batch_step;
};

// Finds the driver's function without linking the driver.
inline cudaError_t find_encoder(PFN_cuTensorMapEncodeTiled_v12000* encoder) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  *encoder = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  return cudaSuccess;
}

// Rows from `seqlen` and columns from `head_dim` on read as zero, whatever lies there. A box is one
// panel of `Layout` (swizzled.cuh). Strides in elements are multiples of 8; that of rows is 0 only where there is one.
template <class Layout>
inline cudaError_t encode_tensor_map(TensorMap* tensor, ElementType element, const void* base, const Strides& strides,
                                     int32_t batch, int32_t seqlen, int32_t heads, int32_t head_dim) {
  static PFN_cuTensorMapEncodeTiled_v12000 encoder = nullptr;
  static const cudaError_t found = find_encoder(&encoder);
  if (found != cudaSuccess) return found;
  if (strides.seq == 0 && seqlen > 1) return cudaErrorInvalidValue;

  tensor->head_step = strides.head != 0;
  tensor->batch_step = strides.batch != 0;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  // Where there is one index, any multiple of 16 will do.
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride != 0 ? stride * 2 : 16); };
  const cuuint64_t sizes[4] = {size(head_dim), size(seqlen), size(tensor->head_step ? heads : 1),
                               size(tensor->batch_step ? batch : 1)};
  const cuuint64_t byte_strides[3] = {bytes(strides.seq), bytes(strides.head), bytes(strides.batch)};
  const cuuint32_t box[4] = {Layout::PANEL_COLS, Layout::ROWS, 1, 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  const CUresult result =
      encoder(&tensor->map, element == ELEMENT_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
              4, const_cast<void*>(base), sizes, byte_strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
              Layout::PANEL_COLS == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
