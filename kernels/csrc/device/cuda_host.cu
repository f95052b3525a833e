// What the CUDA library says about errors and the device that is current.
#include <cuda_runtime.h>

#include "device.h"

#define API extern "C" __attribute__((visibility("default")))

API const char* topoep_device_error(int code) { return cudaGetErrorString(cudaError_t(code)); }

// Blocks that one cluster may hold here; 0 where there are no clusters, or no device.
API int topoep_device_cluster_limit() { return device::cluster_limit(); }
