/* A CUDA runtime without a GPU: PyTorch finds devices, streams and events, and nothing is computed.

Loaded before PyTorch (LD_PRELOAD), it answers what PyTorch asks of libcudart. Only fake tensors may
be used on these devices; memory of the host stands in for the few bytes that PyTorch itself
allocates. The one device is an H100, or has the compute capability FAKE_CUDA_CAPABILITY (89). */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
static const size_t MEMORY = 85ul << 30;
static __thread int current_device = 0;

static void *new_handle(void) { /* of a stream or an event: never read, but distinct */
  static long last = 0;
  return (void *)(__sync_add_and_fetch(&last, 16) + 4096);
}

/* Devices */
EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError(void) { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = MEMORY; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) { *value = 0; return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *card, int device) {
  memset(card, 0, sizeof *card);
  strcpy(card->name, "Fake GPU");
  const char *capability = getenv("FAKE_CUDA_CAPABILITY");
  int number = capability ? atoi(capability) : 90;
  card->major = number / 10;
  card->minor = number % 10;
  card->totalGlobalMem = MEMORY;
  card->multiProcessorCount = 132;
  card->warpSize = 32;
  card->maxThreadsPerBlock = 1024;
  card->maxThreadsPerMultiProcessor = 2048;
  card->regsPerBlock = card->regsPerMultiprocessor = 65536;
  card->sharedMemPerBlock = 49152;
  card->sharedMemPerBlockOptin = 232448;
  card->sharedMemPerMultiprocessor = 233472;
  card->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

/* Streams and events: work is done when it is submitted. */
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { *stream = new_handle(); return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { *stream = new_handle(); return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = new_handle(); return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { *event = new_handle(); return cudaSuccess; }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) { *ms = 1; return cudaSuccess; }

/* Memory */
EXPORT cudaError_t cudaMalloc(void **memory, size_t size) { *memory = malloc(size < 1024 ? 1024 : size); return cudaSuccess; }
EXPORT cudaError_t cudaFree(void *memory) { free(memory); return cudaSuccess; }
EXPORT cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) { *memory = malloc(size); return cudaSuccess; }
EXPORT cudaError_t cudaFreeHost(void *memory) { free(memory); return cudaSuccess; }
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { memmove(to, from, size); return cudaSuccess; }
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) { memmove(to, from, size); return cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) { memset(memory, value, size); return cudaSuccess; }

/* The driver (this library is named libcuda.so.1): no device has a context. */
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = *active = 0; return 0; }
EXPORT bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { return false; } /* c10::cuda::hasPrimaryContext */
