// What the C++ compiler makes of the structs of params.h, for the test that compares them with their twins.
#include <cstddef>

#include "params.h"

extern "C" void flash_training_layout(size_t* sizes) {
  const size_t all[] = {
      sizeof(RmsNormParams),
      offsetof(RmsNormParams, partial),
      offsetof(RmsNormParams, element),
      sizeof(RopeParams),
      offsetof(RopeParams, x_strides),
      offsetof(RopeParams, element),
      sizeof(SwigluParams),
      offsetof(SwigluParams, element),
      sizeof(CrossEntropyParams),
      offsetof(CrossEntropyParams, dlogits),
      offsetof(CrossEntropyParams, element),
      sizeof(EmbeddingParams),
      offsetof(EmbeddingParams, element),
      sizeof(AdamWParams),
      offsetof(AdamWParams, len),
      offsetof(AdamWParams, rounded_element),
      sizeof(AddGradParams),
      offsetof(AddGradParams, element),
      sizeof(GradNormParams),
      offsetof(GradNormParams, element),
      static_cast<size_t>(ROWS_TOGETHER),
      static_cast<size_t>(NUMBERS_TOGETHER),
      static_cast<size_t>(ELEMENT_F32),
  };
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) sizes[i] = all[i];
}
