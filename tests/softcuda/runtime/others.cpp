// Functions of CUDA's other libraries that have to do more than to return a number. It is part of each of them, which
// exports those that are its own.
#include <cstddef>
#include <cstring>

extern "C" {

int softcuda_primary(int device);  // devices.cpp

// Something to point at.
static int it;

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return *flags = 0, *active = softcuda_primary(device), 0;
}
int cuCtxGetCurrent(void** out) { return *out = &it, 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDevicePrimaryCtxRetain(void** out, int) { return *out = &it, 0; }

int cublasCreate_v2(void** out) { return *out = &it, 0; }
int cublasGetVersion_v2(void*, int* out) { return *out = 130000, 0; }
int cublasGetPointerMode_v2(void*, int* out) { return *out = 0, 0; }
int cublasGetMathMode(void*, int* out) { return *out = 0, 0; }

size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* results, int* found) {
  constexpr size_t one = 96;  // sizeof(cublasLtMatmulHeuristicResult_t)
  return memset(results, 0, one), *found = 1, 0;
}

int cudnnGetProperty(int which, int* out) { return *out = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
size_t cudnnGetVersion() { return 92000; }
size_t cudnnGetCudartVersion() { return 13000; }
int ncclGetVersion(int* out) { return *out = 22907, 0; }
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int cuptiGetVersion(unsigned* out) { return *out = 130000, 0; }
int nvshmemid_init_status() { return 0; }

}  // extern "C"
