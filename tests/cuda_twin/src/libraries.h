// What the stubs of NVIDIA's libraries share. It comes before their headers.
#pragma once
#include <cstdlib>
#define __CUDA_FP16_H__  // those headers take one more package
#define __CUDA_BF16_H__
struct __half;
struct __nv_bfloat16;
// Bytes of workspace that products and convolutions ask for: what the real libraries choose can't be known here.
inline size_t workspace_bytes() {
  static size_t n = getenv("TWIN_WORKSPACE") ? strtoull(getenv("TWIN_WORKSPACE"), nullptr, 10) : 0;
  return n;
}
