/* Kernels for any machine of the architecture: NEON on ARM, SSE2 on x86. */
#define TW_NAME tw_baseline
#if defined(__aarch64__)
#define TW_ISA "neon"
#elif defined(__x86_64__)
#define TW_ISA "sse2"
#else
#define TW_ISA "generic"
#endif
#include "kernels.inc"
