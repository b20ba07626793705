// libcublas.so.13: products take the time of their multiplications.
#include "libraries.h"
#include <cublas_v2.h>
#include "device.h"

struct cublasContext { cudaStream_t stream; cublasMath_t math; cublasPointerMode_t mode; };
namespace {
constexpr auto OK = CUBLAS_STATUS_SUCCESS;
using Op = cublasOperation_t;
cublasStatus_t product(cublasHandle_t h, const char* name, double m, double n, double k, double batch, bool half) {
  twin_product(h->stream, name, 2 * m * n * k * batch, half);
  return OK;
}
bool half(cudaDataType type) { return type == CUDA_R_16F || type == CUDA_R_16BF; }
}  // namespace

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t* h) { *h = new cublasContext{nullptr, CUBLAS_DEFAULT_MATH, CUBLAS_POINTER_MODE_HOST}; return OK; }
cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { delete h; return OK; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) { h->stream = s; return OK; }
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t* s) { *s = h->stream; return OK; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return OK; }
cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) { h->math = m; return OK; }
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* m) { *m = h->math; return OK; }
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) { h->mode = m; return OK; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t* m) { *m = h->mode; return OK; }
cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* v) { *v = CUBLAS_VERSION; return OK; }
cublasStatus_t cublasSgemm_v2(cublasHandle_t h, Op, Op, int m, int n, int k, const float*, const float*, int, const float*, int, const float*, float*, int) { return product(h, "Sgemm", m, n, k, 1, false); }
cublasStatus_t cublasDgemm_v2(cublasHandle_t h, Op, Op, int m, int n, int k, const double*, const double*, int, const double*, int, const double*, double*, int) { return product(h, "Dgemm", m, n, k, 1, false); }
cublasStatus_t cublasGemmEx(cublasHandle_t h, Op, Op, int m, int n, int k, const void*, const void*, cudaDataType t, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) { return product(h, "GemmEx", m, n, k, 1, half(t)); }
cublasStatus_t cublasSgemmEx(cublasHandle_t h, Op, Op, int m, int n, int k, const float*, const void*, cudaDataType t, int, const void*, cudaDataType, int, const float*, void*, cudaDataType, int) { return product(h, "SgemmEx", m, n, k, 1, half(t)); }
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, Op, Op, int m, int n, int k, const float*, const float*, int, long long, const float*, int, long long, const float*, float*, int, long long, int batch) { return product(h, "SgemmStridedBatched", m, n, k, batch, false); }
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, Op, Op, int m, int n, int k, const void*, const void*, cudaDataType t, int, long long, const void*, cudaDataType, int, long long, const void*, void*, cudaDataType, int, long long, int batch, cublasComputeType_t, cublasGemmAlgo_t) { return product(h, "GemmStridedBatchedEx", m, n, k, batch, half(t)); }
cublasStatus_t cublasSgemv_v2(cublasHandle_t h, Op, int m, int n, const float*, const float*, int, const float*, int, const float*, float*, int) { return product(h, "Sgemv", m, n, 1, 1, false); }
cublasStatus_t cublasDotEx(cublasHandle_t h, int n, const void*, cudaDataType, int, const void*, cudaDataType, int, void*, cudaDataType, cudaDataType) { return product(h, "DotEx", n, 1, 1, 1, false); }
cublasStatus_t cublasSdot_v2(cublasHandle_t h, int n, const float*, int, const float*, int, float*) { return product(h, "Sdot", n, 1, 1, 1, false); }
}
