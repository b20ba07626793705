// libcublasLt.so.13: every product finds one algorithm.
#include "libraries.h"
#include <cublasLt.h>
#include <algorithm>
#include <cstring>
#include "device.h"

namespace {
constexpr auto OK = CUBLAS_STATUS_SUCCESS;
struct Layout { cudaDataType type; uint64_t rows, columns; int32_t batch; };
Layout& in(cublasLtMatrixLayout_t opaque) { return *reinterpret_cast<Layout*>(opaque); }
}  // namespace

extern "C" {
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) { *d = new cublasLtMatmulDescOpaque_t{}; return OK; }
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { delete d; return OK; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*, size_t) { return OK; }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType t, uint64_t rows, uint64_t columns, int64_t) {
  *l = new cublasLtMatrixLayoutOpaque_t{};
  in(*l) = {t, rows, columns, 1};
  return OK;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { delete l; return OK; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void* v, size_t n) {
  if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && n >= 4) memcpy(&in(l).batch, v, 4);
  return OK;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { *p = new cublasLtMatmulPreferenceOpaque_t{}; return OK; }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { delete p; return OK; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void* v, size_t n) {
  if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) memcpy(p, v, std::min<size_t>(n, 8));
  return OK;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t p, int, cublasLtMatmulHeuristicResult_t* out, int* found) {
  size_t most = 0;
  if (p) memcpy(&most, p, 8);
  *out = {};
  out->workspaceSize = std::min(most, workspace_bytes());
  *found = 1;
  return OK;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t a, const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t s) {
  Layout &x = in(a), &z = in(d);
  double inner = double(x.rows) * x.columns / std::max<uint64_t>(1, z.rows);
  bool half = x.type == CUDA_R_16F || x.type == CUDA_R_16BF;
  twin_product(s, "cublasLtMatmul", 2.0 * z.rows * z.columns * inner * std::max(1, z.batch), half);
  return OK;
}
}
