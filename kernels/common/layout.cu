// What the C++ compiler makes of the structs of params.h, for the test that compares them with their twins.
#include <cstddef>

#include "../launch.cuh"
#include "../params.h"

extern "C" void flash_layout(size_t* sizes) {
  const size_t all[] = {
      sizeof(Strides),
      sizeof(AttnProblem),
      offsetof(AttnProblem, q_strides),
      offsetof(AttnProblem, batch),
      offsetof(AttnProblem, softmax_scale),
      offsetof(AttnProblem, tanh_scale),
      offsetof(AttnProblem, element),
      sizeof(FwdParams),
      offsetof(FwdParams, next_piece),
      sizeof(BwdParams),
      offsetof(BwdParams, lse),
      offsetof(BwdParams, next_piece),
      offsetof(BwdParams, group_parts),
      sizeof(ConvertParams),
      offsetof(ConvertParams, parts),
      offsetof(ConvertParams, element),
      sizeof(Kernel<FwdParams>),
      offsetof(Kernel<FwdParams>, tile_n),
      static_cast<size_t>(ROW_PADDING),
      static_cast<size_t>(MAX_WINDOW),
      static_cast<size_t>(ROWS_PER_TURN),
  };
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) sizes[i] = all[i];
}
