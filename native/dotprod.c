/* Kernels for ARM machines with the dot product instructions (Neoverse N1, Apple M1, and later). */
typedef int tw_dotprod_is_for_arm; /* a translation unit may not be empty */
#if defined(__aarch64__) && defined(__linux__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#define __ARM_FEATURE_DOTPROD 1
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define TW_NAME tw_dotprod
#define TW_ISA "neon-dotprod"
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
