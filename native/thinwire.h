/* Interface of the native kernels: plain C, no torch headers, no Python ABI. kernels/cpu.py mirrors its structures. */
#ifndef THINWIRE_H
#define THINWIRE_H
#include <stdint.h>

#define TW_EXPORT __attribute__((visibility("default")))

enum { TW_ABI = 8 };
enum { TW_IDENTITY, TW_CAST, TW_BLOCK_INT, TW_LLOYD, TW_TOPK, TW_TRELLIS };  /* kind */
enum { TW_BF16, TW_FP16, TW_E4M3, TW_E5M2 };            /* variant of a cast */
enum { TW_F32, TW_F_BF16, TW_F_FP16 };                  /* dtype of x and out, variant of the identity */

typedef struct {
  int32_t kind, bits, variant; /* BLOCK_INT: 1 = affine; LLOYD, TRELLIS: 1 = rotated */
  int32_t stochastic, unbiased;
  int32_t dtype, threads;
  int32_t num_planes, plane_width[3];
  float scale; /* of a sum */
  int64_t plane_at[3];
  int64_t numel, block, num_blocks, tail; /* tail: codes of the last block */
  int64_t scales_at, minima_at, nbytes;
  int64_t world, wire_stride;
  uint64_t rotation, dither;
  uint8_t header[32];
  int32_t grid, num_levels, shift; /* LLOYD, TRELLIS: see the tables in kernels/schema.py */
  uint8_t edges[8], levels[8];
} tw_job;

/* A fake quantization: `Grid` in kernels/schema.py. A tensor is (outer, channels, inner), cut into boxes. */
typedef struct {
  int32_t dtype, threads;
  int32_t quant_min, quant_max;
  int32_t offset, paper;
  int64_t outer, channels, inner;
  int64_t cuts_o, cuts_c, cuts_i; /* how many parts each of them is cut into */
} tw_fake;

/* Exact differences: see kernels/exact.py. */
enum { TW_EXACT_BLOCK = 4096 };
typedef struct {
  int32_t bits, mantissa, exponents, top, threads; /* exponents: the mask of an exponent */
  int64_t numel;
  uint8_t gaps[16], values[16]; /* by class */
} tw_exact;

/* The buffers of one operation, which runs over blocks [first, last), or over elements if there are no blocks. */
typedef struct {
  const tw_job *job;
  const void *x;         /* encode; NULL: recode */
  float *residual;       /* encode, may be NULL */
  const uint8_t *wires;  /* decode_sum, recode; encode: its own wire, to find the residual */
  uint8_t *wire;         /* encode, recode */
  void *out;             /* decode_sum; y or dx of a fake quantization; NULL: dx is not needed */
  const tw_fake *fake;   /* instead of job; it runs over boxes */
  const void *grad;      /* of y; NULL: compute y, not gradients */
  const float *scale, *shift; /* of every channel; shift may be NULL */
  float *sums;           /* gradients of scale and shift, two rows */
  double *partials;      /* two per channel and slice; NULL if no channel is cut */
  double factor;         /* of sums */
  int32_t *bad_scale;    /* becomes 1 if a scale is invalid, or an exact wire is damaged */
  const tw_exact *exact; /* instead of job; it runs over blocks */
  const void *base;      /* exact */
  uint16_t *lengths;     /* bytes of every exact block, written */
  const int64_t *starts; /* of every exact block's bytes in wires, and their end */
  int64_t *counts, stride;
} tw_task;

typedef void (*tw_range)(const tw_task *task, int64_t first, int64_t last);
typedef struct {
  const char *name;
  tw_range encode, decode_sum, recode, fake;
  void (*finish_fake)(const tw_task *task, int64_t slices);
  tw_range exact_encode, exact_decode, exact_count;
} tw_kernels;

#endif
