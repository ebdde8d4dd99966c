// In place of kernels/ptx/proxy_fence.cuh.
#pragma once

namespace ptx {

inline void proxy_fence() { machine::proxy_fence(); }

}  // namespace ptx
