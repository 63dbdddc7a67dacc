/* Kernels for x86 machines with AVX2, FMA, F16C and BMI (Haswell, 2013, and later). */
typedef int tw_avx2_is_for_x86; /* a translation unit may not be empty */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,popcnt,bmi,bmi2"))), apply_to = function)
#define __SSSE3__ 1
#define __SSE4_1__ 1
#define __FMA__ 1
#define __BMI2__ 1
#else
#pragma GCC target("avx2,fma,f16c,popcnt,bmi,bmi2")
#endif
#define TW_NAME tw_avx2
#define TW_ISA "avx2"
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
