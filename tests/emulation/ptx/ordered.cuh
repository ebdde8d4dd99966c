// In place of kernels/ptx/ordered.cuh.
#pragma once

namespace ptx {

// Who loads again waits for another number than before. Blocks run one after the other: it must come from this block.
inline int32_t load_acquire(const int32_t* gmem) {
  std::map<const int32_t*, int32_t>& loaded = machine::current->loaded;
  const auto before = loaded.find(gmem);
  if (before != loaded.end()) machine::wait("a turn", [=] { return *gmem != before->second; });
  machine::take_turn(gmem);
  return loaded[gmem] = *gmem;
}
inline void store_release(int32_t* gmem, int32_t x) {
  machine::pass_turn(gmem);
  *gmem = x;
}

}  // namespace ptx
